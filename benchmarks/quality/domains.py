"""Texts that the model does not know, from packages of the system, and how to get them."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class DomainError(RuntimeError):
    """A domain's texts cannot be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Packages (all of them are taken), and which of their files are texts."""

    packages: tuple[str, ...]
    is_text: Callable[[str], bool]
    says: str


def _is_german_page(name: str) -> bool:
    return "/share/man/de/" in name and name.endswith(".gz")


DOMAINS = {
    "manpages-de": Domain(("manpages-de",), _is_german_page, "German man pages, roff source"),
    "perl": Domain(
        ("perl-modules-5.36",), lambda name: name.endswith((".pm", ".pl", ".pod")), "Perl modules"
    ),
    "c-headers": Domain(
        ("libc6-dev", "linux-libc-dev"),
        lambda name: "/include/" in name and name.endswith(".h"),
        "C headers of the C library and of Linux",
    ),
}
"""`python`, the standard library's sources, needs no package and is always there."""


def domain_source(name: str, cache: Path) -> str:
    """What `DataConfig.source` says for a domain: "stdlib", or a folder of text files, made in `cache` if need be.

    name: a domain, `python`, or a folder of the caller's. Debian packages are downloaded with apt-get, or read where
    they are installed. Raises DomainError.
    """
    if name == "python":
        return "stdlib"
    if name not in DOMAINS:
        if Path(name).expanduser().is_dir():
            return name
        raise DomainError(f"no domain {name!r}: choose from {', '.join((*DOMAINS, 'python'))}, or a folder")
    target = cache / "texts" / name
    if target.is_dir():
        return str(target)
    partial = target.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    taken = sum(
        _extract(package, DOMAINS[name].is_text, cache, partial) for package in DOMAINS[name].packages
    )
    if not taken:
        raise DomainError(
            f"domain {name}: no texts in {', '.join(DOMAINS[name].packages)}; use domain python"
        )
    partial.rename(target)
    return str(target)


def _extract(package: str, is_text: Callable[[str], bool], cache: Path, target: Path) -> int:
    """Copy a package's texts, unpacked, under their own paths. Returns how many."""
    root, files = _package_files(package, cache)
    taken = 0
    for path in files:
        if not is_text(path.as_posix()) or path.is_symlink() or not path.is_file():
            continue
        output = target / package / path.relative_to(root)
        output.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            output.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, output)
        taken += 1
    return taken


def _package_files(package: str, cache: Path) -> tuple[Path, list[Path]]:
    """A package's files and the folder that they lie under: where it is installed, else downloaded."""
    try:
        listed = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return Path("/"), sorted(map(Path, listed.stdout.split("\n")[:-1]))
        unpacked = cache / "packages" / package
        if not unpacked.is_dir():
            downloads = cache / "packages" / f".{package}"
            downloads.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", package], cwd=downloads, capture_output=True, check=True)
            [archive] = downloads.glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", str(archive), str(downloads / "x")], check=True)
            (downloads / "x").rename(unpacked)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        raise DomainError(
            f"cannot get the Debian package {package} ({error} {detail.decode(errors='replace').strip()}); "
            "run apt-get update, or use --domain python or a folder of texts"
        ) from error
    return unpacked, sorted(path for path in unpacked.rglob("*"))
