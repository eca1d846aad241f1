"""Integrations with training frameworks; each is imported by its user."""
