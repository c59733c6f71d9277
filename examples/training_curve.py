"""The plot of a training run: losses and recall accuracy over tokens seen."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_curve(record: list[dict[str, float]], path: Path) -> None:
    """Draws two panels over millions of tokens: nats per token, and the share of exact answers by prompt
    length."""
    tokens = [entry["tokens"] / 1e6 for entry in record]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, label in (
        ("loss", "training mixture"),
        ("mtp_loss", "MTP layer, training mixture"),
        ("text_loss", "held-out Python text"),
    ):
        left.plot(tokens, [entry[name] for entry in record], label=label)
    left.set(xlabel="million tokens", ylabel="nats a token", title="Loss")
    for length in (64, 256, 1024):
        right.plot(tokens, [100 * entry[f"recall_{length}"] for entry in record], label=f"{length} tokens")
    right.set(xlabel="million tokens", ylabel="exact match, %", title="Recall by prompt length")
    right.set_ylim(0, 103)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
