"""What `tasks/webshop` brings (`registry.py`)."""

PROVIDES = {"tasks": {"webshop": "trailmark.tasks.webshop.source:WebShop"}}
