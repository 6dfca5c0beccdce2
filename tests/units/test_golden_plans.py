"""Plans of all builders equal the record, ``tests/golden/plans.json``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden import asks, canonical, records

from ficco.plan.model import paused


def test_plans_are_as_recorded() -> None:
    with paused():
        changed = records.differing(asks.cases())
    if changed:
        pytest.fail(records.message(changed), pytrace=False)


def test_a_change_of_a_plan_changes_its_hash_and_is_shown() -> None:
    case = next(iter(asks.cases().values()))
    plan = case.all_plans()[0]
    step = plan.steps[-1]
    steps = (*plan.steps[:-1], step._replace(posts=step.posts[1:]))
    content, changed = canonical.text([plan]), canonical.text([replace(plan, steps=steps)])
    assert canonical.digest(content) != canonical.digest(changed)
    before, after = records.first_difference({"text": content}, {"text": changed})
    assert before != after and "retire" in before and "retire" in after


def test_names_of_fields_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(iter(asks.cases().values())).all_plans()[0]
    canonical.fields_of.cache_clear()
    try:
        monkeypatch.setitem(canonical.FIELDS, ("Step", "lane"), "track")
        assert "track='sync'" in canonical.plan_text(plan)
    finally:
        monkeypatch.undo()
        canonical.fields_of.cache_clear()


def test_labels_can_be_left_out() -> None:
    text = "   1 label='own part' lane='copy0'\n"
    assert canonical.without_labels(text) == "   1 lane='copy0'\n"
