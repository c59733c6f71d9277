"""Compiles the C module with which Triton launches kernels, so that an image that has it needs no C compiler.

    TRITON_CACHE_DIR=… TRITON_LIBCUDA_PATH=… python3 triton_launcher.py

Triton's cache finds the module again in a process that has the same TRITON_LIBCUDA_PATH, and the program
`file` on its PATH if there is one here. Only the linker looks into the folder of TRITON_LIBCUDA_PATH, for a
library with the functions of CUDA's driver. A process loads the library of its driver.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from triton.backends.nvidia import driver
from triton.runtime.build import compile_so_from_file

SOURCE = Path(driver.dirname) / "driver.c"


def main() -> None:
    stand_in = Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1"
    stand_in.parent.mkdir(parents=True)
    make_driver(stand_in)
    # As CudaUtils of triton.backends.nvidia.driver does, which would also load the module.
    compiled = compile_so_from_file(
        src_path=str(SOURCE),
        name="cuda_utils",
        library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs,
        libraries=driver.libraries,
    )
    stand_in.unlink()  # with it, a process without a GPU would take it for a driver
    print(compiled)


def make_driver(path: Path) -> None:
    """Makes a library with all functions of CUDA's driver that the module names. They do nothing.

    Without them, linkers leave the library out of the module's list of needed libraries.
    """
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", SOURCE.read_text(encoding="utf-8"))))
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", path], input=functions, text=True, check=True)


if __name__ == "__main__":
    main()
