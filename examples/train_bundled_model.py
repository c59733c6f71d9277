"""Trains the bundled model and writes it, with its training curve, into the tree.

    python examples/train_bundled_model.py --minutes 60            # on a GPU if there is one, else the CPU
    python examples/train_bundled_model.py --steps 6000 --seed 0   # the same steps on any machine
    python examples/train_bundled_model.py --minutes 20 --resume   # continue from the last saved state

The learning rate warms up, stays, and falls linearly to zero over the last `DECAY_SHARE` of the run. The run
ends with `--steps` or `--minutes`, whichever comes first. Sequences start short, so that recall is learnt on
few pairs, and end longer than the longest prompt the model is measured on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bundled_tokenizer import save_tokenizer, train_tokenizer
from model_evaluation import recall_accuracy, text_loss
from nemotron_h_training import NemotronHForTraining, TrainingConfig
from published_checkpoint import rounded_to_bfloat16, save_checkpoint
from tokenizers import Tokenizer
from torch import Tensor
from training_curve import draw_curve
from training_data import Batch, TrainingData, library_sources

ROOT = Path(__file__).resolve().parent.parent
STATE = Path(tempfile.gettempdir()) / "twinfang_bundled_model_training.pt"


@dataclass(frozen=True)
class Stage:
    """A part of the run: the shape and the mixture of its batches. It begins at the share `starts_at`."""

    starts_at: float
    num_seqs: int
    num_tokens: int
    mixture: dict[str, float]


VOCAB_SIZE = 1024
WARMUP_STEPS = 100
DECAY_SHARE = 0.3
PEAK_LEARNING_RATE = 4e-3
MTP_WEIGHT = 0.5
"""Scales only the MTP layer's own gradient, which does not reach the target."""
STAGES = (
    Stage(0.0, 16, 256, {"text": 0.25, "recall": 0.45, "chat": 0.06, "copying": 0.16, "addition": 0.08}),
    Stage(0.15, 4, 1216, {"text": 0.47, "recall": 0.28, "chat": 0.11, "copying": 0.05, "addition": 0.09}),
    Stage(0.32, 4, 1216, {"text": 0.58, "recall": 0.10, "chat": 0.19, "copying": 0.04, "addition": 0.09}),
    Stage(0.75, 2, 2240, {"text": 0.58, "recall": 0.10, "chat": 0.19, "copying": 0.04, "addition": 0.09}),
)
"""First come short sequences, mostly of tasks that teach attention to look tokens up; then whole contexts;
then, once recall is learnt, mostly text."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    minutes: float
    steps: int
    seed: int
    out: Path
    curve: Path
    state: Path
    device: str
    threads: int
    resume: bool
    compile: bool
    evaluate_every_s: float


def parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many minutes")
    parser.add_argument("--steps", type=int, default=12_000, help="end after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "twinfang" / "bundled_model")
    parser.add_argument("--curve", type=Path, default=ROOT / "docs" / "bundled_model_training.json")
    parser.add_argument("--state", type=Path, default=STATE, help="file to resume from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--evaluate-every-s", type=float, default=150.0)
    return Arguments(**vars(parser.parse_args()))


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy, weighted by token; logits [B, T, V], targets and weights [B, T]."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def training_losses(model: NemotronHForTraining, token_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of the model and of its MTP layer on one batch; weights[:, i] is the weight of token i + 1."""
    with torch.autocast(token_ids.device.type, torch.bfloat16):
        hidden = model.hidden(token_ids)
        logits = model.lm_head(hidden)
        drafts = model.mtp_logits(token_ids, hidden)
    loss = weighted_loss(logits[:, :-1], token_ids[:, 1:], weights[:, :-1])
    mtp_loss = weighted_loss(drafts[:, :-1], token_ids[:, 2:], weights[:, 1:-1])
    return loss, mtp_loss


def make_optimizers(model: NemotronHForTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for everything else."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embeddings" not in name and "lm_head" not in name
        (matrices if inner else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def learning_rate(step: int, progress: float) -> float:
    """Warm-up, plateau, linear decay to zero."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warmup * min(1.0, max(0.0, 1.0 - progress) / DECAY_SHARE)


def stage_of(progress: float) -> Stage:
    """The last stage that has begun."""
    return next(stage for stage in reversed(STAGES) if progress >= stage.starts_at)


class Training:
    """One run: the model, its optimizers, its data, and the record of its evaluations."""

    def __init__(self, arguments: Arguments, tokenizer: Tokenizer, data: TrainingData) -> None:
        self.arguments, self.tokenizer, self.data = arguments, tokenizer, data
        self.model = NemotronHForTraining(TrainingConfig(vocab_size=VOCAB_SIZE)).to(arguments.device)
        self.optimizers = make_optimizers(self.model)
        self.losses = training_losses
        if arguments.compile:
            self.losses = torch.compile(training_losses, dynamic=False)
        self.step, self.elapsed_s, self.tokens = 0, 0.0, 0
        self.record: list[dict[str, float]] = []

    @property
    def progress(self) -> float:
        """Share of the run that is over."""
        return max(self.step / self.arguments.steps, self.elapsed_s / (60 * self.arguments.minutes))

    def train(self) -> None:
        """Takes steps until the run is over; evaluates and saves on the way and at the end."""
        last_step_at, evaluate_at = time.monotonic(), self.elapsed_s
        loss_sum, mtp_sum, num_summed = 0.0, 0.0, 0
        while self.progress < 1:
            stage = stage_of(self.progress)
            batch = self.data.batch(stage.num_seqs, stage.num_tokens, stage.mixture)
            loss, mtp_loss = self.take_step(batch)
            loss_sum, mtp_sum, num_summed = loss_sum + loss, mtp_sum + mtp_loss, num_summed + 1
            now = time.monotonic()
            self.elapsed_s, last_step_at = self.elapsed_s + now - last_step_at, now
            if self.elapsed_s >= evaluate_at or self.progress >= 1:
                self.evaluate(loss_sum / num_summed, mtp_sum / num_summed)
                self.save()
                evaluate_at = self.elapsed_s + self.arguments.evaluate_every_s
                loss_sum, mtp_sum, num_summed = 0.0, 0.0, 0

    def take_step(self, batch: Batch) -> tuple[float, float]:
        """Updates all weights once."""
        rate = learning_rate(self.step, self.progress)
        token_ids = batch.token_ids.to(self.arguments.device)
        weights = batch.weights.to(self.arguments.device)
        loss, mtp_loss = self.losses(self.model, token_ids, weights)
        (loss + MTP_WEIGHT * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += token_ids.numel()
        return loss.item(), mtp_loss.item()

    def evaluate(self, loss: float, mtp_loss: float) -> None:
        """Adds one entry to the record, measured with the weights that a checkpoint would hold."""
        served = rounded_to_bfloat16(self.model)
        entry = {
            "step": self.step,
            "minutes": round(self.elapsed_s / 60, 2),
            "tokens": self.tokens,
            "loss": round(loss, 4),
            "mtp_loss": round(mtp_loss, 4),
            "text_loss": round(text_loss(served, self.data.held_out_text, num_windows=32), 4),
        }
        for length in (64, 256, 1024):
            entry[f"recall_{length}"] = recall_accuracy(served, self.tokenizer, length, num_prompts=32)
        self.record.append(entry)
        print(" ".join(f"{name} {value:g}" for name, value in entry.items()), flush=True)

    def save(self) -> None:
        """Writes the checkpoint, the curve, and the state to resume from."""
        save_checkpoint(self.model, self.arguments.out)
        save_tokenizer(self.tokenizer, self.arguments.out, self.model.config.max_position_embeddings)
        lines = ",\n".join(json.dumps(entry) for entry in self.record)
        self.arguments.curve.write_text(f"[\n{lines}\n]\n")
        draw_curve(self.record, self.arguments.curve.with_suffix(".png"))
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": (self.step, self.elapsed_s, self.tokens),
            "record": self.record,
            "data_rng": self.data.rng.getstate(),
        }
        torch.save(state, self.arguments.state)

    def resume(self) -> None:
        """Continues from the saved state. Its steps and minutes count as steps and minutes of this run."""
        # The file is our own. It holds the state of a random.Random, which weights_only refuses.
        state = torch.load(self.arguments.state, weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed_s, self.tokens = state["counters"]
        self.record = state["record"]
        self.data.rng.setstate(state["data_rng"])


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    sources = library_sources()
    tokenizer = train_tokenizer(sources, VOCAB_SIZE)
    data = TrainingData(tokenizer, sources, arguments.seed)
    training = Training(arguments, tokenizer, data)
    if arguments.resume:
        training.resume()
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{num_parameters:,} parameters, {len(data.text):,} text tokens", flush=True)
    training.train()


if __name__ == "__main__":
    main()
