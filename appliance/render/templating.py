"""Fills the templates of multi-line files; single lines are built without them."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("appliance.render"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - YAML, not HTML; words that come from outside pass `tojson`
        keep_trailing_newline=True,
    )


def fill(template: str, **values: object) -> str:
    """Return a template of appliance/render/templates with its values.

    Args:
        template: File name in that folder.
        values: Every name the template uses; a missing one is an error.
    """
    return _environment().get_template(template).render(**values)
