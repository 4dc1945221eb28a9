"""Opens engine bundles: validates every field and file.

A bundle is a directory: `manifest.json` (see `ull.bundle.manifest`) and its seal (see `ull.bundle.seal`),
`weights.safetensors` (see `ull.bundle.layout`, for a GPU `ull.bundle.device_layout`), `vocab.bin` (token id -> bytes),
`tokenizer/`, and for a GPU `code/`.
Whatever is wrong with one ends in a `BundleError` that names file, field and remedy.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ull.access import denial, unreadable
from ull.bundle.device_layout import DevicePart, device_parts, entries_of
from ull.bundle.layout import DFLASH, DRAFT, EAGLE, expected_tensors
from ull.bundle.manifest import (
    FORMAT,
    FORMAT_VERSION,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    Manifest,
    Model,
)
from ull.bundle.native_spec import native_spec
from ull.bundle.seal import MANIFEST_FILE, REBUILD, check_seal, read_manifest_bytes
from ull.bundle.tensor_file import TensorEntry, read_tensor_file
from ull.errors import BundleError, ConfigError

VOCABULARY_MAGIC = b"ULLVOCAB"
VOCABULARY_VERSION = 2
_HASH_BLOCK = 1 << 20  # bytes
_ELF_MAGIC = b"\x7fELF"
_ELF_CUDA = 190  # e_machine of a cubin


@dataclass(frozen=True)
class Bundle:
    """An opened, validated bundle. `tensors` says where each tensor lies in `weights_path`.

    `digest` identifies the bundle: the SHA-256 of its manifest, in hexadecimal.
    """

    path: Path
    manifest: Manifest
    tensors: dict[str, TensorEntry]
    digest: str

    @property
    def weights_path(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def vocabulary_path(self) -> Path:
        return self.path / VOCABULARY_FILE

    @property
    def tokenizer_directory(self) -> Path:
        return (self.path / TOKENIZER_FILE).parent

    @property
    def weight_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def read_verified(self, name: str, remedy: str) -> bytes:
        """The whole file `name` of the manifest; BundleError, which ends in `remedy`, when it is not what was built."""
        path = self.path / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleError(unreadable(path, error), field=name) from error
        if hashlib.sha256(data).hexdigest() != self.manifest.files[name].sha256:
            raise BundleError(f"{path} differs from its SHA-256 in the manifest; {remedy}", field=name)
        return data

    def native_spec(self, context: int | None = None, kv: str | None = None) -> dict[str, Any]:
        """The dict that the native core takes; `context` (tokens) and `kv` ("bf16" or "f32") override the manifest's.

        Raises ConfigError when an override is out of range.
        """
        model = self.manifest.model
        if context is not None and not 1 <= context <= model.context:
            raise ConfigError(
                f"engine.context: {context} is out of range; this bundle was built for 1 to {model.context} tokens",
                field="context",
            )
        if kv is not None and kv not in ("bf16", "f32"):
            raise ConfigError(f"kv {kv!r} is not supported; use 'bf16' or 'f32'", field="kv")
        chosen_kv = kv or self.manifest.precision.kv
        return native_spec(
            model, self.weights_path, self.tensors, context or model.context, chosen_kv, self.manifest.speculation
        )


def open_bundle(path: str | Path, verify: Literal["sizes", "hashes"] = "sizes") -> Bundle:
    """Opens and validates the bundle at `path`, whose manifest must be as it was sealed.

    "sizes" compares the other files' sizes with the manifest; "hashes" also reads every byte and compares SHA-256.

    Raises BundleError naming the file, the field and the remedy.
    """
    path = Path(path)
    manifest, digest = read_sealed_manifest(path)
    _check_files(path, manifest)
    for part in device_parts(manifest):
        _check_code(path, part)
    tensors = _read_tensors(path / WEIGHTS_FILE, manifest)
    _check_token_maps(path / WEIGHTS_FILE, manifest, tensors)
    _check_vocabulary(path / VOCABULARY_FILE, manifest.model)
    if verify == "hashes":
        for name, problem in verify_hashes(path, manifest).items():
            if problem is not None:
                raise BundleError(f"{path / name} {problem}; {REBUILD}", field=name)
    return Bundle(path, manifest, tensors, digest)


def read_manifest(path: Path) -> Manifest:
    """Reads and validates `manifest.json` and its seal alone. Raises BundleError."""
    return read_sealed_manifest(path)[0]


def read_sealed_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest as `read_manifest` reads it, and the bundle's digest. Raises BundleError."""
    raw = read_manifest_bytes(path)
    _check_format(path, raw)
    digest = check_seal(path, raw)
    try:
        return msgspec.json.decode(raw, type=Manifest), digest
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path / MANIFEST_FILE} is damaged: {error}; {REBUILD}", field=_field(str(error))) from error


def _check_format(path: Path, raw: bytes) -> None:
    """Tells a manifest that is foreign, older or newer from one that is damaged, which is for others to say."""
    try:
        manifest = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{path} is not an engine bundle: its manifest's format is not {FORMAT!r}", field="format")
    version = manifest.get("format_version")
    if type(version) is int and version != FORMAT_VERSION:
        remedy = f"upgrade ull, or {REBUILD}" if version > FORMAT_VERSION else REBUILD
        raise BundleError(
            f"{path} has bundle format {version}, this ull reads {FORMAT_VERSION}; {remedy}", field="format_version"
        )


def _field(message: str) -> str | None:
    """The path that msgspec names in its message, e.g. `$.model.hidden` -> model.hidden."""
    _, found, path = message.rpartition(" - at `$.")
    return path.rstrip("`") if found else None


def _check_files(path: Path, manifest: Manifest) -> None:
    """Every listed file exists and has its size, and the tokenizer's directory holds no other."""
    for name, entry in manifest.files.items():
        file = path / name
        try:
            status = file.stat()
        except FileNotFoundError as error:
            raise BundleError(f"{file} is missing; {REBUILD}", field=name) from error
        except PermissionError as error:
            raise BundleError(denial(file), field=name) from error
        except OSError as error:
            raise BundleError(f"{file} cannot be read ({error.strerror}); {REBUILD}", field=name) from error
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{file} is not a regular file; {REBUILD}", field=name)
        if status.st_size != entry.bytes:
            state = "is truncated" if status.st_size < entry.bytes else "has the wrong size"
            raise BundleError(f"{file} {state}: {status.st_size} bytes, expected {entry.bytes}; {REBUILD}", field=name)
    directory = Path(TOKENIZER_FILE).parent
    for file in sorted((path / directory).rglob("*")):
        if not file.is_dir() and str(file.relative_to(path)) not in manifest.files:
            raise BundleError(f"{file} is not in the manifest, and would be read; remove it", field=str(directory))


def verify_hashes(
    path: Path, manifest: Manifest, progress: Callable[[int], None] | None = None
) -> dict[str, str | None]:
    """Compares every file with its SHA-256: name -> None, or what is wrong. `progress` is told the bytes read."""
    problems: dict[str, str | None] = {}
    for name, entry in manifest.files.items():
        digest = hashlib.sha256()
        try:
            with (path / name).open("rb") as file:
                while block := file.read(_HASH_BLOCK):
                    digest.update(block)
                    if progress:
                        progress(len(block))
        except FileNotFoundError:
            problems[name] = "is missing"
        except OSError as error:
            problems[name] = f"cannot be read ({error.strerror})"
        else:
            same = digest.hexdigest() == entry.sha256
            problems[name] = None if same else "differs from its SHA-256 in the manifest"
    return problems


def _read_tensors(path: Path, manifest: Manifest) -> dict[str, TensorEntry]:
    """Reads the weights' header and compares it with the layout that the dimensions ask for."""
    if manifest.target == "cpu":
        expected = expected_tensors(manifest.model, manifest.precision, manifest.speculation)
    else:
        expected = {name: shape for part in device_parts(manifest) for name, shape in part.tensors().items()}
    if manifest.random_weights:
        return entries_of({name: shape for name, shape in expected.items() if not shape.optional})
    try:
        tensors = read_tensor_file(path)
    except PermissionError as error:
        raise BundleError(denial(path), field=WEIGHTS_FILE) from error
    except (ValueError, OSError) as error:
        raise BundleError(f"{path} {error}; {REBUILD}", field=WEIGHTS_FILE) from error
    for name, want in expected.items():
        have = tensors.get(name)
        if have is None and not want.optional:
            raise BundleError(f"{path} lacks tensor {name!r}; {REBUILD}", field=name)
        if have is not None and (have.dtype, have.shape) != (want.dtype, want.shape):
            raise BundleError(
                f"{path}: tensor {name!r} is {have.dtype} {list(have.shape)}, "
                f"the manifest asks for {want.dtype} {list(want.shape)}; {REBUILD}",
                field=name,
            )
    for name in tensors:
        if name not in expected:
            raise BundleError(f"{path} holds an unexpected tensor {name!r}; {REBUILD}", field=name)
    return tensors


def _check_token_maps(path: Path, manifest: Manifest, tensors: dict[str, TensorEntry]) -> None:
    """What the heads with a vocabulary of their own propose are tokens of the model, each once."""
    speculation = manifest.speculation
    heads = {} if speculation is None else {EAGLE: speculation.eagle, DFLASH: speculation.dflash}
    for prefix, head in heads.items():
        if head is None or not head.mapped or manifest.random_weights:
            continue
        name = f"{prefix}d2t"
        try:
            tokens = np.fromfile(path, "<i4", head.model.vocabulary, offset=tensors[name].offset)
        except OSError as error:
            raise BundleError(unreadable(path, error), field=WEIGHTS_FILE) from error
        if tokens.min() < 0 or tokens.max() >= manifest.model.vocabulary or len(np.unique(tokens)) != len(tokens):
            raise BundleError(f"{path}: tensor {name!r} is no map into the model's vocabulary; {REBUILD}", field=name)


def _check_code(path: Path, part: DevicePart) -> None:
    """The kernels of a GPU target: all are there, compiled for this model, in files that look like cubins."""
    drafters = {DRAFT: "draft model", EAGLE: "EAGLE head", DFLASH: "DFlash head"}
    code, of = part.code, f" of the {drafters[part.prefix]}" if part.prefix in drafters else ""
    for kernel in sorted(part.needed_kernels() - set(code.kernels())):
        raise BundleError(f"{path} lacks the kernel {kernel!r}{of}; {REBUILD}", field="code.files")
    for name, value in part.macros().items():
        if code.macros.get(name) != value:
            raise BundleError(
                f"{path}: the kernels{of} were compiled with {name} = {code.macros.get(name)} where {value} is needed; "
                f"{REBUILD}",
                field=f"code.macros.{name}",
            )
    for file in code.files:
        try:
            with (path / file.path).open("rb") as stream:
                head = stream.read(20)
        except OSError as error:
            raise BundleError(unreadable(path / file.path, error), field=file.path) from error
        if not head.startswith(_ELF_MAGIC) or int.from_bytes(head[18:20], "little") != _ELF_CUDA:
            raise BundleError(f"{path / file.path} is not a cubin; {REBUILD}", field=file.path)


def _check_vocabulary(path: Path, model: Model) -> None:
    """Checks vocab.bin: magic, version, count, ascending offsets, exact length."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BundleError(unreadable(path, error), field=VOCABULARY_FILE) from error
    count = model.vocabulary
    head = len(VOCABULARY_MAGIC) + 12
    bytes_start = head + 4 * (count + 1) + count
    if raw[: len(VOCABULARY_MAGIC)] != VOCABULARY_MAGIC or len(raw) < head:
        raise BundleError(f"{path} is not a vocabulary table; {REBUILD}", field=VOCABULARY_FILE)
    version, found = np.frombuffer(raw, "<u4", 2, len(VOCABULARY_MAGIC)).tolist()
    if version != VOCABULARY_VERSION:
        raise BundleError(
            f"{path} has version {version}, expected {VOCABULARY_VERSION}; {REBUILD}", field=VOCABULARY_FILE
        )
    if found != count or len(raw) < bytes_start:
        raise BundleError(f"{path} holds {found} tokens, the model has {count}; {REBUILD}", field=VOCABULARY_FILE)
    offsets = np.frombuffer(raw, "<u4", count + 1, head).astype(np.int64)
    if offsets[0] != 0 or bool((np.diff(offsets) < 0).any()) or bytes_start + int(offsets[-1]) != len(raw):
        raise BundleError(f"{path} has damaged offsets; {REBUILD}", field=VOCABULARY_FILE)
