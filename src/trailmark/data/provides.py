"""What `data` brings (`registry.py`)."""

PROVIDES = {"study_data": {"gold": "trailmark.data.for_studies:Gold"}}
