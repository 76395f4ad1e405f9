"""What a hub says of a repository: which files, how large, with which digests, and where.

Listing, addresses and credentials are the hub client's business. Bytes are fetched by
`appliance.fetch.download`: the clients begin a file again after a cut process, and checkpoints are
tens of gigabytes.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository.

    Attributes:
        name: Path in the repository.
        size: Bytes.
        url: Where it is.
        sha256: Of its content, empty if the hub does not say.
        git_sha1: Of its content as git hashes a blob, empty if the hub does not say.
    """

    name: str
    size: int
    url: str
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True)
class Listing:
    """A repository at one revision.

    Attributes:
        commit: Full commit id; empty if the hub does not say.
        files: All of its files.
        headers: What requests for them must carry, credentials included: never printed.
    """

    commit: str
    files: tuple[RemoteFile, ...]
    headers: Mapping[str, str]


class Hub(Protocol):
    """A hub that can list a repository."""

    def list(self, repository: str, revision: str) -> Listing:
        """Say what a repository holds.

        Raises:
            ApplianceError: FETCH_OFFLINE (exit 2), FETCH_NOT_FOUND or FETCH_DENIED (30),
                FETCH_UNREACHABLE (12).
        """
        ...


class HuggingFace:
    """The Hugging Face Hub, or what HF_ENDPOINT names, by huggingface_hub."""

    def list(self, repository: str, revision: str) -> Listing:
        """See `Hub.list`."""
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
        utils: Any = importlib.import_module("huggingface_hub.utils")
        constants: Any = importlib.import_module("huggingface_hub.constants")
        if constants.HF_HUB_OFFLINE:
            raise offline("HF_HUB_OFFLINE")
        endpoint = str(constants.ENDPOINT)
        where = f"{endpoint} {repository}@{revision}"
        try:
            found = hub.HfApi().model_info(
                repository, revision=revision, files_metadata=True, timeout=30.0
            )
        except (errors.GatedRepoError, errors.DisabledRepoError) as error:
            raise denied(where, error) from None
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise not_found(where, error) from None
        except errors.HFValidationError as error:
            raise not_found(where, error) from None
        except Exception as error:  # the client's transport has exceptions of its own
            raise unreachable(where, error) from error
        files = tuple(
            RemoteFile(
                each.rfilename,
                int(each.size or 0),
                str(
                    hub.hf_hub_url(
                        repository, each.rfilename, revision=found.sha, endpoint=endpoint
                    )
                ),
                sha256=str(each.lfs.sha256) if each.lfs else "",
                git_sha1="" if each.lfs else str(each.blob_id or ""),
            )
            for each in found.siblings or ()
        )
        headers = {str(key): str(value) for key, value in utils.build_hf_headers().items()}
        return Listing(str(found.sha or ""), files, headers)


class ModelScope:
    """ModelScope, by its package `modelscope`, which no lock holds."""

    def list(self, repository: str, revision: str) -> Listing:
        """See `Hub.list`.

        Raises:
            ApplianceError: Also PACKAGE_MISSING (exit 2).
        """
        if importlib.util.find_spec("modelscope_hub") is None:
            fault = Fault(
                "PACKAGE_MISSING",
                "appliance model fetch --source modelscope",
                "the package modelscope is installed",
                "no modelscope",
                "run `pip install modelscope`, or use --source hub",
            )
            raise ApplianceError(ExitCode.USAGE, fault)
        client: Any = importlib.import_module("modelscope_hub")
        addresses: Any = importlib.import_module("modelscope.hub.file_download")
        config = client.get_default_config()
        where = f"{config.endpoint} {repository}@{revision}"
        try:
            found = client.HubApi().list_repo_files(
                repository, "model", revision=revision, recursive=False
            )
        except Exception as error:  # the client's errors share no root that tells causes apart
            text = str(error).lower()
            missing = "not found" in text or "404" in text
            raise (not_found if missing else unreachable)(where, error) from error
        files = tuple(
            RemoteFile(
                each.path,
                int(each.size),
                str(
                    addresses.get_file_download_url(
                        repository, each.path, revision, config.endpoint
                    )
                ),
                sha256=str(each.sha256 or ""),
            )
            for each in found
            if each.type != "tree"
        )
        headers = {"Cookie": f"m_session_id={config.token}"} if config.token else {}
        return Listing("", files, headers)


def offline(variable: str) -> ApplianceError:
    """Make the error of a fetch where the environment forbids the network."""
    fix = "run it where the network may be used, and carry the directory over"
    fault = Fault("FETCH_OFFLINE", variable, "a fetch needs the network", "offline", fix)
    return ApplianceError(ExitCode.USAGE, fault)


def not_found(where: str, error: Exception) -> ApplianceError:
    """Make the error of a repository or revision that is not there."""
    fix = "check the name and the revision; a private one needs HF_TOKEN"
    fault = Fault("FETCH_NOT_FOUND", where, "a model at this revision", _short(error), fix)
    return ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def denied(where: str, error: Exception | str) -> ApplianceError:
    """Make the error of a repository that wants an agreement or a token."""
    fix = "accept its terms on the hub and set HF_TOKEN"
    fault = Fault("FETCH_DENIED", where, "leave to read it", _short(error), fix)
    return ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def unreachable(where: str, error: Exception | str) -> ApplianceError:
    """Make the error of a hub that does not answer."""
    fix = "check the network and run the same command again, it goes on where it was"
    fault = Fault("FETCH_UNREACHABLE", where, "the hub must answer", _short(error), fix)
    return ApplianceError(ExitCode.CONTAINER, fault)


def _short(error: Exception | str) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
