"""The hooks that mkdocs calls while it builds the site: a thin shell around `website.pages`."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files
from website.pages import (
    API,
    PROJECT,
    ROOT,
    find_links,
    find_place,
    list_reference_pages,
    read_navigation,
    render_api_page,
    render_folder,
    render_notebook,
    rewrite,
)

_origins: dict[str, str] = {}  # path in the site -> path in the repository


def on_config(config: Any) -> Any:
    """Navigation, and packages to watch, before anything is read."""
    navigation = read_navigation()
    (reference,) = [section["Reference"] for section in navigation if "Reference" in section]
    names = [row for row in list_reference_pages() if row not in reference]
    known = {target for row in reference for target in row.values()}
    names = [row for row in names if not set(row.values()) & known]
    reference[0] = {"Python names": ["reference/README.md", *names]}
    reference.append({"Python names on one page": API})
    navigation.append({"Project": [{title: find_place(origin)} for title, origin in PROJECT.items()]})
    config.nav = navigation
    return config


def on_files(files: Files, config: Any) -> Files:
    """Take in what pages link to outside of docs/, and leave out what is no page."""
    for file in list(files):
        if file.src_uri.startswith("examples/") or file.src_uri == "README.md":
            files.remove(file)
    _origins.clear()
    _origins.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    waiting = ["README.md", "docs/README.md", *PROJECT.values(), *(o for o in _origins.values() if o.endswith(".md"))]
    seen: set[str] = set()
    while waiting:
        origin = waiting.pop()
        if origin in seen:
            continue
        seen.add(origin)
        place = find_place(origin)
        if place not in _origins:
            _origins[place] = origin
            files.append(_make_file(config, origin, place))
        if (ROOT / origin).is_dir():
            waiting += [f"{origin}/{path.name}" for path in (ROOT / origin).iterdir() if path.is_file()]
        elif origin.endswith(".md"):
            waiting += [one for one in find_links(origin) if one not in seen and (ROOT / one).exists()]
    files.append(File.generated(config, API, content=render_api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the site."""
    place = page.file.src_uri
    origin = _origins.get(place)
    if origin is None:
        return markdown
    return rewrite(markdown, f"{origin}/README.md" if (ROOT / origin).is_dir() else origin, place)


def _make_file(config: Any, origin: str, place: str) -> File:
    path = ROOT / origin
    if path.is_dir():
        return File.generated(config, place, content=render_folder(origin))
    if path.suffix == ".ipynb":
        return File.generated(config, place, content=render_notebook(path))
    return File.generated(config, place, abs_src_path=str(path))
