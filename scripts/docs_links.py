# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
mkdocs hook: links from a page to files outside docs/, such as `../trl_calclip/callbacks.py`, lead to the repository.

The pages are read in the repository too, where such links work as they are. Without a `repo_url` in `mkdocs.yml` the
file's name stays and the link goes.
"""

import re
from pathlib import Path


_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Called by mkdocs for each page before it is rendered."""
    root = Path(config["config_file_path"]).parent

    def link(match: re.Match) -> str:
        path = root / match["path"]
        if not path.exists():
            return match[0]  # mkdocs reports it
        if not config["repo_url"]:
            return match["text"]
        kind = "tree" if path.is_dir() else "blob"
        return f"[{match['text']}]({config['repo_url']}/{kind}/main/{match['path']}{match['anchor'] or ''})"

    return _OUTSIDE.sub(link, markdown)
