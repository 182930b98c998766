"""Criteria that stand beside the first ones where these cannot decide: rates for each setting, controls, intervals."""
