"""A catalogue of a few products that nobody sells."""

import json

BEDS = "Home › Bedroom › Beds"


def product(asin, title, **more):
    return {
        "asin": asin, "Title": title, "Description": "", "BulletPoints": [], "pricing": [20.0], "options": {},
        "Attributes": [], "query": "beds", "product_category": BEDS, **more,
    }  # fmt: skip


PRODUCTS = [
    product("B01", "Oak Bed Frame", Description="A bed of oak.", BulletPoints=["Strong and quiet", "Ten years old"],
            pricing=[95.0], options={"size": ["queen", "king"], "color": ["oak brown", "white"]},
            Attributes=["solid wood", "easy assemble"]),
    product("B02", "Steel Bed Frame", pricing=[40.0, 60.0], Attributes=["heavy duty"]),
    product("B03", "Cat Bed", BulletPoints=["Washable: put it into the machine"], pricing=[12.5],
            Attributes=["machine washable"], query="cat beds", product_category="Pets › Cats › Cat Beds"),
    product("B04", "Reading Lamp", pricing=[985.0], Attributes=["warm light"], query="lamps",
            product_category="Home › Lamps", Reviews=[{"title": "Bright", "score": 5, "body": "I can read again."}]),
    product("B05", "Desk Lamp", pricing=[], options={"color": ["red", "blue"], "light": ["red", "warm"]},
            Attributes=["warm light"], query="lamps", product_category="Home › Lamps"),
    *(product(f"C{i:02}", f"Pillow Number {i}", query="pillows", product_category="Home › Pillows",
              Attributes=["soft touch"]) for i in range(12)),
]  # fmt: skip
GOALS = [
    {"asin": "B01", "split": "train", "instruction": "Find me solid wood beds", "attributes": ["solid wood"],
     "human": False},
    {"asin": "B02", "split": "test", "instruction": "Find me heavy duty beds", "attributes": ["heavy duty"],
     "human": False},
    {"asin": "B03", "split": "train", "instruction": "a bed for my cat that I can wash.",
     "attributes": ["machine washable"], "instruction_options": [], "human": True},
    {"asin": "B04", "split": "test", "instruction": "a lamp", "attributes": ["warm light"], "instruction_options": [],
     "human": True},
    {"asin": "B05", "split": "train", "instruction": "Find me lamps", "attributes": [], "human": False},
]  # fmt: skip


def write(folder, products=PRODUCTS, goals=GOALS):
    """A folder with products.jsonl and, if there are any, goals.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "products.jsonl").write_text("".join(json.dumps(p) + "\n" for p in products))
    if goals is not None:
        (folder / "goals.jsonl").write_text("".join(json.dumps(g) + "\n" for g in goals))
    return folder
