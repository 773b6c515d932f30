"""Train a small token classifier with Accelerate, on MPS, CUDA or the CPU, without a change.

    accelerate launch docs/examples/train_with_accelerate.py          # the best device, or what accelerate config says
    accelerate launch --cpu docs/examples/train_with_accelerate.py
    accelerate launch --multi_gpu --num_processes 2 docs/examples/train_with_accelerate.py

The sentences are made up, and the model begins with random weights: it learns which words are diseases.
"""

import random

import torch
from accelerate import Accelerator
from transformers import AutoModelForTokenClassification

import openmed_nb as nb

DISEASES = ("asthma", "diabetes", "hypertension", "pneumonia", "anemia", "migraine")
PEOPLE = ("The patient", "His mother", "Her father", "A man of 60")
BEGINNINGS = ("has", "never had", "was treated for", "reports")
EPOCHS, ROWS = 4, 8


def sentences(count: int) -> list[tuple[str, str]]:
    """Return made-up sentences, each with the disease in it."""
    made = random.Random(0)  # noqa: S311 - the same sentences in every process
    diseases = [made.choice(DISEASES) for _ in range(count)]
    return [(f"{made.choice(PEOPLE)} {made.choice(BEGINNINGS)} {disease} .", disease) for disease in diseases]


def samples(tokenizer, pairs):
    """Return tokens and labels of sentences: 1 for each token of a disease, 0 for other words, -100 for what is none."""
    found = []
    for text, disease in pairs:
        encoded = tokenizer(text, padding="max_length", truncation=True, max_length=24, return_offsets_mapping=True)
        begin = text.index(disease)
        labels = [
            -100 if first == last else int(begin <= first < begin + len(disease))
            for first, last in encoded.pop("offset_mapping")
        ]
        tensors = {name: torch.tensor(values) for name, values in encoded.items()}
        found.append({**tensors, "labels": torch.tensor(labels)})
    return found


def main() -> None:
    accelerator = Accelerator()  # The device is Accelerate's to choose; nb.epochs follows it.
    torch.manual_seed(0)
    parts = nb.load_model("bundled_small", device="cpu")  # For its tokenizer and its shape.
    model = AutoModelForTokenClassification.from_config(parts["config"])
    data = samples(parts["tokenizer"], sentences(64))
    loader = torch.utils.data.DataLoader(data, ROWS, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    epochs = nb.epochs(EPOCHS, accelerator)  # Memory is released and measured after each epoch.
    for epoch in epochs:
        total = torch.zeros((), device=accelerator.device)  # Reading a loss at each step would make the device wait.
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total / len(loader), "mean").item()
        accelerator.print(f"epoch {epoch + 1} on {accelerator.device.type}: loss {mean:.4f}", flush=True)
    accelerator.print(f"memory: {epochs.curve.verdict}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
