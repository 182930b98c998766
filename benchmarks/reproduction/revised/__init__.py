"""Criteria that are added to first ones that cannot decide: rates for each setting, controls, intervals."""
