"""Every relative link leads to a file of the repository, and to a heading where it names one."""

from __future__ import annotations

import pytest

from tests.docs.pages import PAGES, ROOT, Page

PROJECT = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    broken = []
    for link in page.links:
        if link.target.startswith(("https://", "mailto:")):
            continue
        file, _, anchor = link.target.partition("#")
        target = (page.path.parent / file).resolve() if file else page.path
        if not target.is_relative_to(ROOT) or not target.exists():
            broken.append(f"{page.name}:{link.line}: {link.target}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in Page(target).anchors):
            broken.append(f"{page.name}:{link.line}: {link.target}: no such heading")
        elif link.text.startswith("`test_") and f"def {link.text.strip('`')}(" not in target.read_text():
            broken.append(f"{page.name}:{link.line}: no {link.text} in {link.target}")
    assert not broken, "\n".join(broken)


def test_every_page_is_linked_from_another() -> None:
    linked = {(page.path.parent / link.target.partition("#")[0]).resolve() for page in PAGES for link in page.links}
    lonely = [page.name for page in PAGES if page.path not in linked and page.name not in PROJECT]
    assert not lonely
