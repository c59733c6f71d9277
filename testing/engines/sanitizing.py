"""Whether engines that tests make themselves sanitize: the same as in processes that tests start."""

import os

SANITIZE = os.environ.get("TWINFANG_SANITIZE") == "1"
