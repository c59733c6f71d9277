"""Facts of ``/v1/completions``."""

from testing.api_facts.fact import INVALID, Endpoint, Fact
from testing.api_facts.sampling import SAMPLING

COMPLETIONS = Endpoint(
    "/v1/completions",
    "openai",
    {"prompt": "import ", "max_tokens": 4},
    (
        Fact("prompt: a text", "def f("),
        Fact("prompt: texts", ["def f(", "class "]),
        Fact("prompt: token ids", [17, 23, 42]),
        Fact("prompt: lists of token ids", [[17, 23], [42]]),
        Fact("prompt: empty", "", INVALID),
        Fact("max_tokens", 2),
        Fact("max_tokens: above the context", 1 << 20, "400 context_length_exceeded"),
        Fact("max_tokens: 0", 0, INVALID),
        Fact("max_tokens: 0 with echo", 0, beside={"echo": True}),
        Fact("max_completion_tokens", 2, INVALID),
        Fact("echo", True),
        Fact("logprobs", 2),
        Fact("logprobs: above 20", 21, INVALID),
        Fact("best_of: equal to n", 2, beside={"n": 2}),
        Fact("best_of: more than n", 2, INVALID),
        Fact("suffix", "return x", INVALID),
        Fact("add_special_tokens", False),
        *SAMPLING,
    ),
)
