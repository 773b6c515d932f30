"""Read the operators that torch registers for MPS out of the macOS library ``libtorch_cpu.dylib``, on any computer.

The macOS wheel of torch holds the library (``pip download torch==2.13.0 --no-deps --only-binary=:all: --platform
macosx_14_0_arm64 --python-version 311``); pass the wheel or the library itself. The library's symbols are not stripped: each
function ``TORCH_LIBRARY_IMPL_init_aten_MPS_N`` registers operators, and hands the name of each, such as ``abs.out``, to
``torch::Library::impl`` as the address of a string. In the machine code of arm64 such an address is made of two
instructions, ADRP and ADD. The entries after ``by hand`` come from ``MPSFallback.mm``: they run on the CPU, or raise an
error, and are not kernels of MPS.

    python scripts/read_mps_registrations.py torch-2.13.0-cp311-cp311-macosx_14_0_arm64.whl > \
        tests/recorded/mps_operators_torch_2_13.txt
"""

from __future__ import annotations

import argparse
import bisect
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "torch/lib/libtorch_cpu.dylib"
MAGIC, SEGMENT, SYMBOLS = 0xFEEDFACF, 0x19, 0x2
REGISTERS = re.compile(r"TORCH_LIBRARY_IMPL_init_aten_MPS_\d+ERN5torch7LibraryE$")
GENERATED = "__ZN2at12_GLOBAL__N_1"
"""How the names of functions begin that torchgen wrote (``RegisterMPS_*.cpp``)."""


@dataclass(frozen=True)
class Section:
    """A part of a library: its address in memory, its size, and where it is in the file."""

    address: int
    size: int
    offset: int

    def holds(self, address: int) -> bool:
        """Return whether an address is in the section."""
        return self.address <= address < self.address + self.size


@dataclass(frozen=True)
class Library:
    """A library of macOS for 64 bits.

    Attributes:
        data: The file.
        sections: Its sections by name.
        symbols: The names of its functions with their addresses.
    """

    data: bytes
    sections: dict[str, Section]
    symbols: list[tuple[str, int]]

    def string(self, address: int) -> str:
        """Return the text at an address."""
        section = self.sections["__cstring"]
        start = section.offset + address - section.address
        return self.data[start : self.data.index(b"\0", start)].decode()

    def words(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the machine instructions between two addresses, each with its address."""
        section = self.sections["__text"]
        code = self.data[section.offset + start - section.address : section.offset + end - section.address]
        yield from zip(range(start, end, 4), (word for (word,) in struct.iter_unpack("<I", code)), strict=True)


def read_library(data: bytes) -> Library:
    """Return a library from its file (Mach-O: a header, then commands that say where everything is)."""
    magic, *_, count, _size, _flags, _reserved = struct.unpack_from("<8I", data)
    if magic != MAGIC:
        raise SystemExit("This is not a 64-bit library of macOS.")
    sections, symbols, place = {}, [], 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, place)
        if command == SEGMENT:
            sections.update(read_sections(data, place))
        if command == SYMBOLS:
            symbols = list(read_symbols(data, place))
        place += size
    return Library(data, sections, symbols)


def read_sections(data: bytes, place: int) -> Iterator[tuple[str, Section]]:
    """Yield the sections of a segment."""
    (count,) = struct.unpack_from("<I", data, place + 64)
    for start in range(place + 72, place + 72 + 80 * count, 80):
        address, size, offset = struct.unpack_from("<QQI", data, start + 32)
        yield data[start : start + 16].rstrip(b"\0").decode(), Section(address, size, offset)


def read_symbols(data: bytes, place: int) -> Iterator[tuple[str, int]]:
    """Yield the names of functions with their addresses; the first section is the program's text."""
    offset, count, names, _size = struct.unpack_from("<4I", data, place + 8)
    for name, kind, section, _description, address in struct.iter_unpack("<IBBHQ", data[offset : offset + 16 * count]):
        if section == 1 and not kind & 0xE0:  # The others are notes for debuggers.
            start = names + name
            yield data[start : data.index(b"\0", start)].decode(), address


def addresses(library: Library, start: int, end: int) -> Iterator[int]:
    """Yield the addresses that a function makes with ADRP and ADD."""
    pages: dict[int, int] = {}
    for place, word in library.words(start, end):
        if word & 0x9F000000 == 0x90000000:  # ADRP: the page of an address, relative to this instruction.
            number = (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
            number -= (number >> 20) << 21  # It has a sign.
            pages[word & 31] = (place & ~0xFFF) + (number << 12)
        elif word & 0xFF800000 == 0x91000000 and (word >> 5 & 31) in pages:  # ADD: the place in the page.
            yield pages[word >> 5 & 31] + (word >> 10 & 0xFFF)


def registrations(library: Library) -> Iterator[tuple[str, bool]]:
    """Yield the operators that are registered for MPS, and whether by torchgen's code or by hand."""
    starts = sorted(address for _, address in library.symbols)
    for name, start in library.symbols:
        if REGISTERS.search(name):
            end = starts[bisect.bisect_right(starts, start)]
            for address in addresses(library, start, end):
                if library.sections["__cstring"].holds(address):
                    yield library.string(address), name.startswith(GENERATED)


def main() -> None:
    """Print one operator a line, those that were written by hand with a note."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="libtorch_cpu.dylib, or a wheel of torch for macOS")
    file = parser.parse_args().file
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            data = wheel.read(LIBRARY)
    else:
        data = file.read_bytes()
    found = sorted(set(registrations(read_library(data))))
    print(f"# Registered for MPS in {file.name}, read by scripts/read_mps_registrations.py")
    for name, generated in found:
        print(f"aten::{name}" if generated else f"aten::{name}  # by hand")


if __name__ == "__main__":
    main()
