"""Fact tables that answers are checked against; knows no wording."""
