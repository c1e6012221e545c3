"""Links into the repository are there where `REPO_URL` says where it is; see `mkdocs.yml`."""

from typing import Any


def on_config(config: Any) -> Any:
    """Takes the edit links away if there is no repository to link to."""
    if not config.repo_url:
        config.repo_url = config.edit_uri = None
    return config
