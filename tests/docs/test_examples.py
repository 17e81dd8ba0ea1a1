"""Every fenced block of the documentation runs, or is of a kind that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.docs.pages import PAGES, Page
from tests.docs.reader import Reader, shows
from tests.support.services import PostgresServer

RUN = {"python", "console", "bash"}
READ = {"json"}
"""Only parsed."""
INERT = {"text"}
"""Drawings, excerpts, commands that need a reader's own server."""

WITH_EXAMPLES = [page for page in PAGES if any(block.tag in RUN for block in page.blocks)]


@pytest.fixture
def reader(page: Page, request: pytest.FixtureRequest) -> Iterator[Reader]:
    made: list[tuple[PostgresServer, str]] = []

    def redis() -> str:
        return str(request.getfixturevalue("redis_server").new_database())

    def postgres() -> str:
        server = request.getfixturevalue("postgres_server")
        made.append((server, server.create_database()))
        return made[-1][1]

    reader = Reader(page, redis=redis, postgres=postgres)
    yield reader
    reader.close()
    for server, url in made:
        server.drop_database(url)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_examples_do_what_they_say(page: Page, reader: Reader) -> None:
    for block in page.blocks:
        if block.tag in RUN:
            reader.read(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page: Page) -> None:
    unknown = [(block.line, block.tag) for block in page.blocks if block.tag not in RUN | READ | INERT]
    assert not unknown, f"{page.name}: blocks that would not be tested: {unknown}"
    for block in page.blocks:
        if block.tag in READ:
            json.loads(block.text)


def test_what_a_page_shows_is_compared_with_what_comes() -> None:
    assert shows("key  ...\nstate COMPLETED\n...\nend", "key a1\nstate   COMPLETED\nx\ny\nend\n")
    assert not shows("state COMPLETED", "state RELEASED")
    assert not shows("one line", "one line\nand another")
