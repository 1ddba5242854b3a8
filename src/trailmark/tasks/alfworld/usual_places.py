"""Where things usually are: how often (in %) a receptacle of a kind holds a thing of a kind, if the room has one.

Counted once over the rooms of the training split, and rounded. Pairs that are not listed are below one percent. This is
the only knowledge that the exploring expert has before a play.
"""

from __future__ import annotations

RARE = 0.5  # percent for pairs that are not listed

_COUNTED = """
alarmclock: diningtable 59 countertop 52 desk 47 dresser 39 sidetable 33 shelf 11
apple: fridge 37 diningtable 28 garbagecan 22 microwave 22 sidetable 20 countertop 19 sinkbasin 17
book: bed 56 coffeetable 39 desk 33 countertop 31 diningtable 29 dresser 20 sofa 19 armchair 12 tvstand 8
    sidetable 7 cabinet 3 drawer 3 shelf 1
bowl: desk 67 coffeetable 33 fridge 30 tvstand 29 diningtable 28 dresser 27 countertop 15 shelf 9 sidetable 6
    sinkbasin 6 cabinet 5 microwave 5
box: diningtable 57 desk 36 coffeetable 26 sofa 22 dresser 9 tvstand 9 ottoman 7 cabinet 6 sidetable 6 shelf 5
    armchair 3
bread: diningtable 42 countertop 31 fridge 15 sidetable 6 garbagecan 1
butterknife: diningtable 42 countertop 37 sidetable 17 sinkbasin 10 drawer 3
candle: sidetable 59 countertop 41 toilet 35 coffeetable 33 tvstand 33 diningtable 29 dresser 25 shelf 21 cart 20
    cabinet 12 drawer 8
cd: diningtable 50 dresser 35 desk 33 sidetable 25 garbagecan 15 armchair 10 drawer 9 cabinet 8 safe 6 shelf 4
cellphone: bed 39 diningtable 35 desk 33 coffeetable 31 dresser 30 tvstand 30 countertop 25 sofa 21 ottoman 19
    safe 19 sidetable 17 armchair 16 drawer 5 shelf 5
cloth: bathtubbasin 61 dresser 31 countertop 24 cabinet 19 cart 19 shelf 14 drawer 10 sinkbasin 9 toilet 5
    sidetable 4
creditcard: desk 32 tvstand 32 diningtable 31 dresser 31 countertop 27 sofa 26 coffeetable 23 sidetable 21
    armchair 17 ottoman 12 drawer 9 shelf 9
cup: fridge 32 diningtable 28 sidetable 18 sinkbasin 17 countertop 16 microwave 12 shelf 5 cabinet 3
desklamp: sidetable 42 desk 35 dresser 31 coffeetable 16 shelf 3
dishsponge: bathtubbasin 40 diningtable 25 countertop 20 cart 18 sinkbasin 15 toilet 13 garbagecan 10 shelf 9
    sidetable 8 drawer 7 cabinet 3
egg: fridge 36 diningtable 23 sinkbasin 22 garbagecan 21 microwave 19 countertop 18 sidetable 17
fork: diningtable 39 countertop 30 sidetable 16 sinkbasin 16 drawer 7
glassbottle: diningtable 30 countertop 17 sinkbasin 17 fridge 14 garbagecan 13 shelf 7 cabinet 4
handtowel: handtowelholder 79 countertop 4
kettle: diningtable 19 stoveburner 17 countertop 15 cabinet 3 sinkbasin 3 shelf 1
keychain: desk 33 safe 32 dresser 31 tvstand 29 diningtable 28 coffeetable 26 sidetable 22 sofa 14 ottoman 13
    armchair 11 drawer 8 shelf 7 countertop 6 cabinet 2
knife: diningtable 40 countertop 32 sidetable 9 sinkbasin 8 drawer 6
ladle: diningtable 40 countertop 28 cabinet 4 drawer 4 sinkbasin 4
laptop: bed 66 countertop 48 diningtable 37 desk 30 coffeetable 26 sofa 26 tvstand 17 dresser 15 ottoman 9
    armchair 5 sidetable 3
lettuce: diningtable 42 fridge 32 countertop 26 sidetable 15 sinkbasin 9 garbagecan 2
mug: desk 55 coffeemachine 36 dresser 33 countertop 24 diningtable 24 fridge 24 sidetable 20 microwave 14
    sinkbasin 13 shelf 7 cabinet 3
newspaper: diningtable 42 dresser 38 sofa 24 coffeetable 23 ottoman 14 sidetable 13 tvstand 12 shelf 11 armchair 10
    drawer 1
pan: countertop 23 stoveburner 22 diningtable 8 fridge 6 cabinet 1
pen: desk 49 diningtable 45 dresser 40 coffeetable 39 countertop 27 sidetable 26 tvstand 24 shelf 10 drawer 6
    garbagecan 5
pencil: desk 41 diningtable 39 coffeetable 32 dresser 31 sidetable 31 countertop 24 tvstand 16 shelf 11
    garbagecan 10 drawer 6
peppershaker: diningtable 30 countertop 23 sidetable 23 shelf 9 cabinet 5 drawer 5
pillow: bed 87 sofa 59 armchair 12 ottoman 1
plate: diningtable 31 coffeetable 23 countertop 20 tvstand 18 fridge 13 dresser 9 sidetable 7 shelf 6 cabinet 5
    sinkbasin 4 microwave 1
pot: stoveburner 33 countertop 10 diningtable 8 fridge 7 shelf 1 sinkbasin 1
potato: fridge 37 diningtable 29 countertop 20 sinkbasin 20 microwave 17 sidetable 13 garbagecan 11
remotecontrol: countertop 52 desk 40 tvstand 34 coffeetable 32 dresser 31 diningtable 30 sofa 22 sidetable 15
    ottoman 12 armchair 9 drawer 4 shelf 3
saltshaker: diningtable 31 countertop 23 sidetable 22 shelf 8 cabinet 4 drawer 4
soapbar: sidetable 39 bathtubbasin 32 countertop 30 toilet 22 sinkbasin 19 cart 16 shelf 14 cabinet 11 garbagecan 11
    drawer 8
soapbottle: diningtable 37 dresser 37 toilet 30 countertop 25 garbagecan 17 sidetable 17 cart 14 shelf 14 cabinet 5
    drawer 1
spatula: diningtable 40 countertop 30 sinkbasin 16 drawer 7 sidetable 6
spoon: diningtable 36 countertop 26 sinkbasin 20 sidetable 19 drawer 9
spraybottle: sidetable 52 countertop 36 toilet 34 cart 31 dresser 30 diningtable 29 shelf 19 garbagecan 17 cabinet 7
statue: diningtable 41 coffeetable 38 desk 37 tvstand 37 dresser 33 countertop 27 sidetable 23 shelf 18
tissuebox: countertop 50 coffeetable 46 desk 45 diningtable 38 tvstand 29 cart 22 shelf 21 sidetable 20 dresser 15
    cabinet 10 drawer 6 toilet 3 garbagecan 1
toiletpaper: countertop 33 toilet 33 dresser 32 sidetable 31 toiletpaperhanger 22 cart 20 shelf 18 garbagecan 16
    cabinet 11 drawer 8
tomato: fridge 47 diningtable 34 countertop 22 garbagecan 17 sidetable 16 sinkbasin 12
vase: dresser 55 coffeetable 38 diningtable 36 desk 34 tvstand 31 countertop 26 sidetable 23 shelf 21 cabinet 6
watch: tvstand 45 desk 44 diningtable 39 dresser 34 coffeetable 31 sidetable 21 drawer 9 shelf 5
wateringcan: coffeetable 47 shelf 20 sidetable 12
winebottle: diningtable 39 countertop 30 garbagecan 15 shelf 5 cabinet 3 fridge 2 sidetable 1
"""


def _table(text: str) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    row: dict[str, float] = {}
    for line in text.strip().splitlines():
        if not line.startswith(" "):
            thing, line = line.split(": ")
            row = table[thing] = {}
        words = line.split()
        row.update(zip(words[::2], map(float, words[1::2])))
    return table


_TABLE = _table(_COUNTED)


def chance(thing: str, receptacle: str) -> float:
    """How often, in %, a receptacle of this kind holds such a thing: `chance("apple", "fridge")`."""
    return _TABLE.get(thing, {}).get(receptacle, RARE)
