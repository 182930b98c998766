"""Criteria that are added to the first ones where these cannot decide: rates for each setting, controls, intervals."""
