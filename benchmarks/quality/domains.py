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
    """Copy a package's texts, unpacked, under their own paths. Returns how many.

    Slim images install packages without their man pages, so one without texts is downloaded too.
    """
    taken = 0
    for files_of in (_installed_files, _downloaded_files):
        root, files = files_of(package, cache)
        taken = _copy(package, is_text, root, files, target)
        if taken:
            break
    return taken


def _copy(package: str, is_text: Callable[[str], bool], root: Path, files: list[Path], target: Path) -> int:
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


def _installed_files(package: str, _cache: Path) -> tuple[Path, list[Path]]:
    """The root folder, and what lies there of a package; nothing if it is not installed."""
    try:
        listed = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
    except OSError:  # no dpkg: the download says so
        return Path("/"), []
    return Path("/"), sorted(map(Path, listed.stdout.split("\n")[:-1])) if listed.returncode == 0 else []


def _downloaded_files(package: str, cache: Path) -> tuple[Path, list[Path]]:
    """The folder where a package was unpacked, downloaded before if need be, and its files. Raises DomainError."""
    unpacked = cache / "packages" / package
    try:
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
            "run apt-get update, or use --domains python or a folder of texts"
        ) from error
    return unpacked, sorted(unpacked.rglob("*"))
