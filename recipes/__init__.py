"""Recipes as package data: one YAML file per experiment, in a folder per domain."""
