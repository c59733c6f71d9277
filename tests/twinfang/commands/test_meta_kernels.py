"""What imports torch without its meta kernels (twinfang/commands/meta_kernels.py)."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from twinfang.commands.meta_kernels import META_KERNELS, put_off_meta_kernels

put_off_meta_kernels()
put_off_meta_kernels()
import torch

assert "torch._decomp" not in sys.modules, "the import ran the meta kernels"
assert float(torch.nn.functional.softmax(torch.zeros(4), dim=0).sum()) == 1.0
import torch._meta_registrations

assert "torch._decomp" not in sys.modules, "a further import ran the meta kernels"
assert callable(torch._meta_registrations.register_meta)
assert "torch._decomp" in sys.modules, "the meta kernels can't be used any more"
assert type(sys.modules[META_KERNELS]) is type(sys)
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    assert torch.nn.functional.softmax(torch.zeros(4, 5), dim=1).shape == (4, 5)
"""

SIZES = """
import sys
from twinfang.commands.meta_kernels import put_off_meta_kernels

put_off_meta_kernels()
import torch

from engine.cost.weight_size import register_meta_kernels, weight_bytes
from engine.models import read_config
from twinfang.flags.table import BUNDLED_MODEL

assert weight_bytes(read_config(BUNDLED_MODEL, "auto", torch.device("cpu"), "auto")) > 0
assert "torch._decomp" not in sys.modules, "the bundled model needs a meta kernel of torch"
table, rows = torch.empty(3, 2, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
try:
    table.index_select(0, rows)
except NotImplementedError:
    pass
else:
    raise AssertionError("index_select has a meta kernel; this test needs another operation")
register_meta_kernels()
assert table.index_select(0, rows).shape == (2, 2)
"""


def test_the_size_of_weights_is_computed_without_them_or_after_registering_them():
    ran = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_torch_registers_its_meta_kernels_only_when_their_module_is_used():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
