"""URLs of object stores in keys that else name a folder.

No fsspec here: a config is read without it.
"""

from __future__ import annotations

import importlib.util
import re

from titanlite.utils import has_login, pip_install, public

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]*\]")
#: Kind of store where checkpoints may lie -> the package that fsspec needs for it.
STORES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "oci": "ocifs",
    "oss": "ossfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
#: How stores get a login: never in a URL.
_LOGINS = {
    **dict.fromkeys(("s3", "s3a"), "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role"),
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("az", "abfs", "abfss"), "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"),
    "hf": "HF_TOKEN",
}


def is_url(text: str) -> bool:
    """`s3://bucket/run`, in contrast to a path."""
    return _URL.match(text) is not None


def public_name(name: str) -> str:
    """Return a URL without user, query and fragment, the same for each signature."""
    if "://" not in name:
        return public(name)
    plain = re.sub(r";[\w.-]+=[^/]*|#.*=.*", "", name.partition("?")[0])
    if plain.lower().startswith("http"):
        plain = plain.partition("#")[0]
    return re.sub(r"://[^/?]*@", "://", plain)


def public_names(text: str) -> str:
    """Return a text with each URL in quotes as `public_name` gives it."""
    return re.sub(r"""(?<=['"])[^'"]+://[^'"]*(?=['"])""", lambda url: public_name(url[0]), text)


def chain_problem(url: str) -> str:
    """Return why a URL is refused before fsspec reads it; or "".

    fsspec takes `reference://part::https://host/file`, and runs templates in the file there.
    """
    if "::" not in _IPV6.sub("", url):
        return ""
    return "is a chain of URLs (::), which is refused: it can run code; copy the file and name it"


def store_needs(scheme: str, error: ImportError) -> str:
    """Return what to install for a store that fsspec cannot open."""
    package = STORES.get(scheme)
    if package is None:
        return f"{scheme}:// needs a package that is not installed: {error}"
    return f"{scheme}:// needs the package {package}: {pip_install(package)}"


def login_problem(url: str) -> tuple[str, str] | None:
    """Why a login in the URL of a store cannot open it, and a remedy; None: it may."""
    scheme = url.partition("://")[0].lower()
    if scheme not in _LOGINS or not has_login(url):
        return None
    return (
        "has a login, which its store does not read",
        f"take it out, and give it by {_LOGINS[scheme]}",
    )


def url_problem(url: str) -> tuple[str, str] | None:
    """Why checkpoints cannot lie there, and a remedy; None: nothing is known against it."""
    scheme = url.partition("://")[0].lower()
    if scheme == "file":
        return None
    if not url.partition("://")[2].strip("/"):
        return "names no bucket", f"{scheme}://bucket/folder"
    if scheme == "memory":
        return (
            "is the memory of one process, which no other one sees",
            "name a folder or a store, such as s3://",
        )
    package = STORES.get(scheme)
    if package is None:
        return (
            f"is of no kind of store that is known here: {scheme}",
            "name a folder, or a URL such as s3://bucket/folder",
        )
    if importlib.util.find_spec(package) is None:
        return f"needs the package {package}, which is not installed", pip_install(package)
    return None
