"""Builds the kernels into one shared library with a plain C interface; without a compiler the package installs all the same."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/rabbet_hw_cpu/csrc")
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fopenmp-simd", "-fvisibility=hidden", "-pthread"]
# Tuned for a processor of that kind: tuning for all of them makes some compilers avoid fused products in some of the loops
# that compute the same, and then a row's bits depend on how many rows are computed with it.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512", "-mtune=skylake-avx512"]
VARIANTS = {"generic": [], "avx2": ["-mavx2", "-mfma", "-mtune=haswell"], "avx512": AVX512}
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]


class BuildKernels(build_ext):
    """Compiles each source with its own instruction set and links them."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name: the library knows nothing of Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link, or say what is missing and go on."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        try:
            # A process that runs from this place keeps the old file, and none sees half a new one.
            finished = target.with_name(f"{target.name}.new")
            self._build(finished, work)
            finished.replace(target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            sys.stderr.write(f"rabbet-hw-cpu: the kernels were not compiled ({error}); plain torch will be used\n")

    def copy_extensions_to_source(self) -> None:
        """Into the checkout of an editable install, if there is something to copy."""
        if all(Path(self.build_lib, self.get_ext_filename(ext.name)).exists() for ext in self.extensions):
            super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        """What was built, maybe nothing."""
        return [path for path in super().get_outputs() if Path(path).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        """The same for editable installs."""
        return {built: source for built, source in super().get_output_mapping().items() if Path(built).exists()}

    @staticmethod
    def _build(target: Path, work: Path) -> None:
        compiler = os.environ.get("CXX", "g++")
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        jobs = [("pool", "pool.cpp", []), ("api", "api.cpp", ["-DRABBET_HAS_X86"] if is_x86 else [])]
        jobs += [(name, f"{name}.cpp", AMX if is_x86 else []) for name in ("amx_linear", "amx_attention")]
        for name, flags in VARIANTS.items():
            if is_x86 or name == "generic":
                flags = [f"-DRABBET_VARIANT={name}", "-Wno-psabi", *flags]
                jobs.append((name, "portable.cpp", flags))
                jobs += [(f"{name}_{part}", f"portable_{part}.cpp", flags) for part in ("attention", "linear")]
        objects = []
        running = []
        for name, source, flags in jobs:
            objects.append(str(work / f"{name}.o"))
            command = [compiler, *COMMON, *flags, "-c", str(SOURCES / source), "-o", objects[-1]]
            running.append((subprocess.Popen(command), command))
        for process, command in running:
            if process.wait() != 0:
                raise subprocess.CalledProcessError(process.returncode, command)
        subprocess.run(
            [compiler, "-shared", "-pthread", "-static-libstdc++", "-static-libgcc", *objects, "-o", str(target)],
            check=True,
        )


setup(
    ext_modules=[
        Extension(
            "rabbet_hw_cpu._kernels",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
