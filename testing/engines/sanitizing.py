"""Whether the sanitizer is on in engines of the test's own process: the same as in processes that it
starts."""

import os

SANITIZE = os.environ.get("TWINFANG_SANITIZE") == "1"
