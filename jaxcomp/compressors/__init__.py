"""Codes of one flat array, without axes or collectives. Imports from no other room."""
