"""`titanlite tokenizer`: fetch a model's tokenizer from the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite.cli.parser import Commands, add_group, new_command
from titanlite.data import DataError
from titanlite.data.chat import TEMPLATE
from titanlite.data.connectivity import reach
from titanlite.data.remote import words
from titanlite.data.tokenizer import FOLDER_FILES, load_tokenizer
from titanlite.data.tokenizer.hf_json import NAMING_FILES
from titanlite.utils import pip_install


def add_commands(commands: Commands) -> None:
    """Add `titanlite tokenizer` and its commands to argparse."""
    actions = add_group(commands, "tokenizer", "fetch a tokenizer from the Hugging Face hub")
    fetch = new_command(
        actions,
        _fetch,
        "fetch",
        "download the tokenizer of a model",
        "Download the tokenizer's files of a model from the Hugging Face hub, and "
        "check that titanlite reads them. HF_TOKEN, or a login of huggingface_hub, "
        "opens gated models.",
    )
    fetch.add("repository", "id of the model, such as meta-llama/Llama-3.1-8B", "REPO")
    fetch.add("--out", "where to put them; default: assets/hf/NAME of REPO", "FOLDER", type=Path)
    fetch.add("--revision", "branch, tag or commit; default: main", "NAME")


def _fetch(arguments: argparse.Namespace) -> str:
    repository = arguments.repository
    revision = arguments.revision
    folder = arguments.out or Path("assets", "hf", repository.rpartition("/")[2])
    names = fetch(repository, folder, revision)
    tokenizer = load_tokenizer(str(folder))
    return (
        f"{folder}: {', '.join(names)} of {repository}; {tokenizer.vocab_size:,} ids\n"
        f'[model]\ntokenizer_path = "{folder}"'
    )


def fetch(repository: str, folder: Path, revision: str | None = None) -> list[str]:
    """Download the tokenizer's files of a model of the hub into a folder; return their names.

    Raises DataError with the remedy if the hub refuses, or cannot be reached, or the model has no
    tokenizer.
    """
    try:
        from huggingface_hub import HfApi, errors, hf_hub_download
    except ImportError:
        raise DataError(
            f"fetching needs the package huggingface_hub: {pip_install('huggingface_hub')}"
        ) from None
    page = f"https://huggingface.co/{repository}"
    remedy = "run it on a machine with a network, and copy the folder; see HF_ENDPOINT, HTTPS_PROXY"
    reach("hf://", f"{repository} cannot be fetched", remedy)
    try:
        there = HfApi().list_repo_files(repository, revision=revision)
        names = [name for name in (*FOLDER_FILES, *NAMING_FILES, TEMPLATE) if name in there]
        if set(names).isdisjoint(FOLDER_FILES):
            files = " or ".join(FOLDER_FILES)
            raise DataError(f"{repository} holds no {files}; look at {page} for another model")
        for name in names:
            hf_hub_download(repository, name, revision=revision, local_dir=folder)
    except errors.GatedRepoError:
        remedy = f"ask for access at {page}, and set HF_TOKEN to a token of that account"
        raise DataError(f"{repository} is gated: {remedy}") from None
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    ) as error:
        what = f"{repository}, revision {revision}," if revision else repository
        raise DataError(
            f"{what} is not on the hub, or not visible to you. Check the spelling (owner/name). "
            "If it is private, set HF_TOKEN"
        ) from error
    except DataError:
        raise
    # Its HTTP library has errors, too.
    except Exception as error:
        raise DataError(
            f"{repository} cannot be fetched: {words(error)}; see HF_ENDPOINT, HTTPS_PROXY"
        ) from error
    return names
