"""Compiles one Triton kernel of a directory with the Triton of the Python that runs this file.

It runs as a process of its own, because each Triton release needs its own Python environment. Standard input: a JSON
object of the arguments of `compile_kernel`. Standard output: a JSON object of its results.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from base64 import b64encode
from typing import Any


def compile_kernel(
    directory: str,
    module: str,
    function: str,
    target: str,
    wave: int,
    signature: dict[str, str],
    constants: dict[str, Any],
    divisors: dict[str, int],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Returns the assembly text, the code object in base64, shared memory in bytes, and the release of Triton.

    signature: the Triton type of each argument, "constexpr" for a constant.
    divisors: the number that divides the value of an argument. options: options of Triton's compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sys.path.insert(0, directory)
    kernel = getattr(importlib.import_module(module), function)
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", number]] for name, number in divisors.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("hip", target, wave), options=options)
    return {
        "assembly": compiled.asm["amdgcn"],
        "image": b64encode(compiled.asm["hsaco"]).decode(),
        "shared": compiled.metadata.shared,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    import os

    with tempfile.TemporaryDirectory(prefix="peer-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        print(json.dumps(compile_kernel(**json.load(sys.stdin))))
