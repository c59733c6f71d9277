"""The flags for drafts and for their states."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.values import integer, one_of

SPECULATIVE = Flag(
    *("--speculative", "K", integer(0, 15)),
    "tokens drafted per step. The same on all servers: the KV of MTP layers comes from the prefill server",
    default=0,
    setting="num_speculative",
)
DRAFTER = Flag(
    *("--drafter", "mtp|ngram", one_of("mtp", "ngram")),
    "what drafts; mtp: the checkpoint's MTP layers; ngram: finds an earlier place in the text with the same "
    "last tokens, and drafts what followed there",
    default_text="mtp if the checkpoint has MTP layers, else ngram",
)
NGRAM_MIN = Flag(
    *("--ngram-min", "TOKENS", integer(1), "fewest tokens that drafter ngram must find again"), default=2
)
NGRAM_MAX = Flag(
    *("--ngram-max", "TOKENS", integer(1), "most tokens that drafter ngram looks for"), default=4
)
SPECULATIVE_STATE = Flag(
    *("--speculative-state", "auto|slots|replay", one_of("auto", "slots", "replay")),
    "where rows with drafts keep recurrent states; slots: one after every position; replay: one, and the "
    "last step's inputs, which the next step repeats; auto: replay on a GPU where it moves far fewer bytes",
    default="auto",
)

SPECULATION = (SPECULATIVE, DRAFTER, NGRAM_MIN, NGRAM_MAX, SPECULATIVE_STATE)
