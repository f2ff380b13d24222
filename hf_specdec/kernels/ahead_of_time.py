"""What kernels need of a GPU, found by compiling them where there is none.

Triton brings the assembler; neither driver nor device is asked. A process that set
``TRITON_INTERPRET`` before the kernels were imported can't compile them.
"""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hf_specdec import kernels
from hf_specdec.kernels.variants import Variant

ARCHITECTURES = (80, 90)
"""Compute capabilities, times ten: A100 and H100."""


@dataclass(frozen=True)
class Resources:
    """Of one program of a kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that didn't fit in registers, stored and loaded.
        stack: bytes of a thread.
        shared: bytes of shared memory.
    """

    registers: int
    spilled: int
    stack: int
    shared: int


def kernel_modules() -> list[str]:
    """Names of this package's modules that have kernels (a function ``variants``)."""
    names = [
        f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)
    ]
    return [name for name in names if callable(getattr(import_module(name), "variants", None))]


def all_variants() -> list[Variant]:
    """Every way in which any kernel is launched."""
    return [v for name in kernel_modules() for v in import_module(name).variants()]


def missing_tools() -> str | None:
    """Why nothing can be compiled here, ``None`` if it can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, kernels are interpreted and not compiled"
    try:
        assembler = _tools() / "ptxas"
    except ImportError:
        return "triton isn't installed"
    if not assembler.is_file():
        return f"this triton brings no assembler: {assembler} is missing"
    return None


def compile_variant(variant: Variant, architecture: int, **options: int) -> Resources:
    """Compile and assemble one variant.

    Args:
        variant: what to compile.
        architecture: compute capability times ten.
        **options: of Triton's compiler, besides the number of warps.

    Raises:
        RuntimeError: the assembler refused it; Triton's compiler raises errors of its own.
    """
    # The default changes in Triton 3.10, which warns until somebody has chosen.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    unknown = {*variant.signature, *variant.constexprs} ^ set(names)
    if unknown:
        raise RuntimeError(f"{variant.name}: arguments and parameters differ in {sorted(unknown)}")
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs=variant.constexprs,
        attrs={(names.index(a),): [["tt.divisibility", 16]] for a in variant.divisible_by_16},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.num_warps, **options},
    )
    return _assembled(variant.name, compiled.asm["ptx"], compiled.metadata.shared)


def _assembled(name: str, ptx: str, shared: int) -> Resources:
    target, version = (re.search(p, ptx) for p in (r"\.target (\w+)", r"\.version ([\d.]+)"))
    assert target is not None and version is not None
    # Triton brings an older and a newer assembler, each for some versions of the language.
    newer = _tools() / "ptxas-blackwell"
    tool = newer if newer.is_file() and float(version[1]) > 8.8 else _tools() / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"-arch={target[1]}", file.name, "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
    report = result.stdout + result.stderr
    if result.returncode:
        raise RuntimeError(f"{name}: {tool.name} failed:\n{report}")

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        if found is None:
            raise RuntimeError(f"{name}: {tool.name} doesn't say {pattern!r}:\n{report}")
        return int(found[1])

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack"),
        shared=shared,
    )


def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
