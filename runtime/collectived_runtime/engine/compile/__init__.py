"""Pure: from a collective to packs, algorithms and plans."""
