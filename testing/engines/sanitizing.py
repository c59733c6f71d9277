"""Whether the engines that tests make themselves sanitize: as those of the processes that tests start."""

import os

SANITIZE = os.environ.get("TWINFANG_SANITIZE") == "1"
