import subprocess
import sys

SCRIPT = """
import resource
from wire.open_files import raise_open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
assert raise_open_file_limit() == 200
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
assert raise_open_file_limit() == 200
"""


def test_the_soft_limit_becomes_the_hard_one():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
