"""Negotiations about items: CaSiNo (food, water and firewood for a camp) and DealOrNoDeal, paid by rule."""
