"""Render the recipe of conda-forge as rattler-build does: part of `make wheels`, in its environment."""

from __future__ import annotations

from pathlib import Path

from rattler_build import Stage0Recipe, VariantConfig

RECIPE = Path(__file__).with_name("recipe.yaml")
# The values that conda-forge's pinning gives for Linux, as far as the recipe uses them.
PINNED = {
    "target_platform": ["linux-64"],
    "python": ["3.12.*"],
    "c_compiler": ["gcc"],
    "c_compiler_version": ["14"],
    "c_stdlib": ["sysroot"],
    "c_stdlib_version": ["2.28"],
}


def main() -> None:
    rendered = Stage0Recipe.from_file(RECIPE).render(VariantConfig(PINNED))
    if len(rendered) != 1:
        raise SystemExit(f"{RECIPE.name} renders to {len(rendered)} packages, expected one")
    package = rendered[0].recipe.to_dict()
    print(
        f"{RECIPE.parent.name}/{RECIPE.name} renders: collectived {package['package']['version']}, with "
        f"{', '.join(package['requirements']['build'])} and {len(package['requirements']['run'])} packages to run"
    )


if __name__ == "__main__":
    main()
