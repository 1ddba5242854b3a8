"""What `seats` brings (`registry.py`): the function that opens the engine of each kind of seat."""

PROVIDES = {
    "engines": {
        "local": "trailmark.seats.open:open_engine",
        "http": "trailmark.seats.open:open_server",
        "scripted": "trailmark.seats.open:open_script",
        "person": "trailmark.seats.open:open_person",
    },
}
