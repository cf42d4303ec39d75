"""Build the training text from freely licensed Debian documentation packages.

`python -m nano.corpus FOLDER` downloads the packages of `PACKAGES` at their pinned versions,
unpacks their pages and sources, and writes FOLDER/documents.jsonl.xz (plain text, one document a
line), FOLDER/names.jsonl.xz (documented names for the question part) and FOLDER/sources.json
(package, version, licence, characters). The same packages give the same bytes. Only packages under
permissive licences are listed (PSF, BSD, MIT, Apache-2.0, PostgreSQL, HPND); each carries its own
copyright file. Pages that are indexes or duplicates, and lines that repeat over many pages of a
package (navigation), are dropped.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import lzma
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nano.markup import documented_names, page_text


class Package(NamedTuple):
    """One Debian package (release bookworm) and what of it is read."""

    name: str
    version: str
    licence: str
    only: str = ""


PACKAGES = (
    Package("python3.11-doc", "3.11.2-6+deb12u8", "PSF-2.0"),
    Package("libpython3.11-stdlib", "3.11.2-6+deb12u8", "PSF-2.0"),
    Package("libpython3.11-minimal", "3.11.2-6+deb12u8", "PSF-2.0"),
    Package("python-django-doc", "3:3.2.25-0+deb12u3", "BSD-3-Clause"),
    Package("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT"),
    Package("sphinx-doc", "5.3.0-4", "BSD-2-Clause"),
    Package("python-jinja2-doc", "3.1.2-1+deb12u3", "BSD-3-Clause"),
    Package("cmake-doc", "3.25.1-1", "BSD-3-Clause"),
    Package("python-tornado-doc", "6.2.0-3+deb12u4", "Apache-2.0"),
    Package("python-aiohttp-doc", "3.8.4-1+deb12u1", "Apache-2.0"),
    Package("python-attr-doc", "22.2.0-1", "MIT"),
    Package("python-pytest-doc", "7.2.1-2", "MIT"),
    Package("python-flask-doc", "2.2.2-3", "BSD-3-Clause"),
    Package("python-werkzeug-doc", "2.2.2-3+deb12u1", "BSD-3-Clause"),
    Package("python-celery-doc", "5.2.6-5", "BSD-3-Clause"),
    Package("python-click-doc", "8.1.3-2", "BSD-3-Clause"),
    Package("python-pygments-doc", "2.14.0+dfsg-1", "BSD-2-Clause"),
    Package("python-setuptools-doc", "66.1.1-1+deb12u2", "MIT"),
    Package("python-cryptography-doc", "38.0.4-3+deb12u1", "Apache-2.0 or BSD-3-Clause"),
    Package("python-requests-doc", "2.28.1+dfsg-1", "Apache-2.0"),
    Package("python-babel-doc", "2.10.3-1", "BSD-3-Clause"),
    Package("python-mpmath-doc", "1.2.1-2", "BSD-3-Clause"),
    Package("python-h5py-doc", "3.7.0-8", "BSD-3-Clause"),
    Package("python-pandas-doc", "1.5.3+dfsg-2", "BSD-3-Clause"),
    Package("python-sympy-doc", "1.11.1-1", "BSD-3-Clause"),
    Package("python-xarray-doc", "2023.01.0-1.1", "Apache-2.0"),
    Package("python-pil-doc", "9.4.0-1.1+deb12u1", "HPND"),
    Package("nodejs-doc", "18.20.4+dfsg-1~deb12u2", "MIT"),
    Package("postgresql-doc-15", "15.18-0+deb12u1", "PostgreSQL"),
    Package("twisted-doc", "22.4.0-4+deb12u1", "MIT"),
    Package("llvm-15-doc", "1:15.0.6-4", "Apache-2.0 with LLVM exception"),
    Package("python-scipy-doc", "1.10.1-2", "BSD-3-Clause"),
    Package("python-astropy-doc", "5.2.1-2+deb12u1", "BSD-3-Clause"),
    Package(
        "rust-doc",
        "1.63.0+dfsg1-2",
        "MIT or Apache-2.0",
        only=r"/html/(book|reference|nomicon|rust-by-example|cargo|rustc|edition-guide|rustdoc)/",
    ),
)
_SKIPPED = re.compile(
    r"(genindex|search|py-modindex|print|_modules/|/tests?/|idle_test|lib2to3/pgen|encodings/"
    r"|pydoc_data|/first-edition/|/second-edition/|/2018-edition/|contents\.html|whatsnew/changelog)"
)
MIN_CHARACTERS = 200
MAX_CHARACTERS = 200_000
REPEATED_LINE_PAGES = 40


def fetch(package: Package, folder: Path) -> Path:
    """Download a package with apt and return the path of its file."""
    found = sorted(folder.glob(f"{package.name}_*.deb"))
    if not found:
        wanted = f"{package.name}={package.version}"
        subprocess.run(["apt-get", "download", wanted], cwd=folder, check=True)
        found = sorted(folder.glob(f"{package.name}_*.deb"))
    return found[0]


def unpack(archive: Path, folder: Path) -> None:
    """Extract pages and Python sources of a package into `folder`."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)


def read_text(path: Path) -> str:
    """Text of a page or source file, decompressed if need be."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", errors="ignore")


def package_files(package: Package, folder: Path) -> Iterator[Path]:
    """Files of the unpacked package that hold text to read, in a fixed order."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix not in {".html", ".py", ".gz"} or path.is_symlink() or not path.is_file():
            continue
        if path.suffix == ".gz" and not name.endswith(".html.gz"):
            continue
        if _SKIPPED.search(name) or (package.only and not re.search(package.only, "/" + name)):
            continue
        yield path


def package_documents(package: Package, folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Plain documents and documented names of one unpacked package."""
    texts: list[str] = []
    names: list[dict[str, str]] = []
    for path in package_files(package, folder):
        raw = read_text(path)
        if path.suffix == ".py":
            texts.append(raw.expandtabs(4).strip())
            continue
        texts.append(page_text(raw))
        names += [
            {"name": item.name, "signature": item.signature, "text": "\n".join(item.paragraphs)}
            for item in documented_names(raw)
        ]
    return without_repeated_lines(texts), names


def without_repeated_lines(texts: list[str]) -> list[str]:
    """Drop long lines found on very many pages of a package, and documents found twice."""
    pages: collections.Counter[str] = collections.Counter()
    for text in texts:
        pages.update({line for line in text.splitlines() if len(line) > 30})
    seen: set[int] = set()
    kept: list[str] = []
    for text in texts:
        lines = (line for line in text.splitlines() if pages[line] < REPEATED_LINE_PAGES)
        clean = "\n".join(lines)[:MAX_CHARACTERS]
        if len(clean) >= MIN_CHARACTERS and hash(clean) not in seen:
            seen.add(hash(clean))
            kept.append(clean)
    return kept


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Write records as xz-compressed JSON lines."""
    with lzma.open(path, "wt", preset=6, encoding="utf-8") as stream:
        stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_lines(path: Path) -> list[dict[str, str]]:
    """Read what `write_lines` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def build(folder: Path) -> None:
    """Download, unpack, read and write everything."""
    archives = folder / "debs"
    archives.mkdir(parents=True, exist_ok=True)
    documents: list[dict[str, str]] = []
    names: list[dict[str, str]] = []
    sources: list[dict[str, str | int]] = []
    for package in PACKAGES:
        root = folder / "root" / package.name
        unpack(fetch(package, archives), root)
        texts, found = package_documents(package, root)
        documents += [{"source": package.name, "text": text} for text in texts]
        names += [{"source": package.name, **item} for item in found]
        size = sum(map(len, texts))
        sources.append({**package._asdict(), "documents": len(texts), "characters": size})
        print(f"{package.name}: {len(texts)} documents, {size / 1e6:.2f} M characters")
    write_lines(folder / "documents.jsonl.xz", documents)
    write_lines(folder / "names.jsonl.xz", names)
    (folder / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="work folder; packages and results are kept there"
    )
    build(parser.parse_args().folder)


if __name__ == "__main__":
    main()
