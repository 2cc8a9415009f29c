"""Accelerate, with dicts, a collate function and parameter groups."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count, vocabulary):
        generator = torch.Generator().manual_seed(4)
        self.rows = [torch.randint(1, vocabulary, (5,), generator=generator).tolist() for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"tokens": self.rows[index], "label": self.rows[index][0] % 2}


class Bag(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens).mean(1)))


def get_loaders(accelerator, batch_size):
    def collate(examples):
        return {
            "tokens": torch.tensor([one["tokens"] for one in examples]),
            "labels": torch.tensor([one["label"] for one in examples]),
        }

    train = DataLoader(Sentences(16, 30), shuffle=True, collate_fn=collate, batch_size=batch_size)
    held_out = DataLoader(Sentences(8, 30), collate_fn=collate, batch_size=batch_size)
    return train, held_out


def training_function(config):
    accelerator = Accelerator(cpu=True)
    batch_size = int(config["batch_size"])
    train_loader, eval_loader = get_loaders(accelerator, batch_size)
    torch.manual_seed(config["seed"])
    model = Bag(30)
    no_decay = ["bias", "norm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(train_loader) * config["epochs"])
    criterion = nn.CrossEntropyLoss()
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(config["epochs"]):
        model.train()
        for batch in train_loader:
            outputs = model(batch["tokens"])
            loss = criterion(outputs, batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.print("loss", loss.item())
        model.eval()
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["tokens"]).argmax(-1)
            accelerator.gather_for_metrics((predictions, batch["labels"]))
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "/dev/null")


def main():
    training_function({"lr": 1e-2, "epochs": 6, "seed": 0, "batch_size": 16})


if __name__ == "__main__":
    main()
