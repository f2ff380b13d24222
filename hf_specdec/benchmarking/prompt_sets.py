"""The built-in prompts, written for this project; none is in a training set of the shipped drafter.

``general`` is what earlier numbers were measured on. The other sets are of one kind each, because
acceptance depends on the kind of text: code and summaries repeat much of what stands in the prompt.
"""

from collections.abc import Iterable

GENERAL = (
    "Explain why the sky is blue to a ten-year-old.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a crocodile and an alligator?",
    "Give me five tips for learning a new language as an adult.",
    "Write a polite email asking my landlord to repair the heating.",
    "How does a bicycle stay upright when it moves?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Describe the process of making bread from flour to loaf.",
    "What is photosynthesis and why is it important?",
    "Suggest a simple dinner with tomatoes, rice and beans.",
    "Summarize the story of Cinderella in a few sentences.",
    "What should I pack for a weekend hike in the mountains?",
    "Explain what inflation is and how it affects families.",
    "Write a poem about the first snow of winter.",
    "How do vaccines protect us from diseases?",
    "What are the advantages of working from home?",
)

CHAT = (
    "My neighbour plays the drums late at night. How can I bring it up without starting a fight?",
    "I have a free Sunday and twenty euros. What could I do in a small town?",
    "Which is the better pet for a flat on the fourth floor, a rabbit or a parrot, and why?",
    "I keep forgetting people's names right after they introduce themselves. Any tricks?",
    "Help me write a toast for my grandmother's eightieth birthday. She loves trains.",
    "What happens to a letter between the moment I post it and the moment it arrives?",
    "My sourdough comes out flat every time. What am I probably doing wrong?",
    "I'm nervous about my first day as a tour guide. How should I prepare the evening before?",
)

CODE = (
    "Write a Python function `merge_intervals(intervals)` that merges overlapping intervals given "
    "as (start, end) tuples and returns them sorted. Add a docstring and two examples.",
    "Add type hints and a docstring to this function and leave its behaviour as it is:\n\n"
    "def group(words):\n    groups = {}\n    for word in words:\n"
    "        groups.setdefault(word[0].lower(), []).append(word)\n    return groups",
    "This function should return the second largest number, but it fails for [5, 5, 3]. Fix it:\n\n"
    "def second_largest(numbers):\n    numbers = sorted(numbers)\n    return numbers[-2]",
    "Write an SQL query that lists every customer with the number of orders and the total amount "
    "in 2023, from tables customers(id, name) and orders(id, customer_id, date, amount).",
    "Rewrite this loop as a list comprehension and explain the difference:\n\nresult = []\n"
    "for line in lines:\n    line = line.strip()\n    if line and not line.startswith('#'):\n"
    "        result.append(line.split('=')[0])",
    "Write a JavaScript class `Stopwatch` with the methods start, stop, reset and elapsed.",
    "Write pytest tests for a function `slugify(title)` that lowers the case, replaces spaces by "
    "dashes and drops punctuation.",
    "Write a Bash script that renames all .jpeg files of a folder to .jpg and prints how many.",
)

_SUMMARISE = "Summarise the following text in two sentences.\n\n"
SUMMARISING = (
    _SUMMARISE + "The ferry between Norhamn and the island of Vessa has run every day since 1911, "
    "except for three winters in which the strait was frozen. Last spring the county announced "
    "that the old ship would be replaced by an electric one, which carries fewer cars but needs "
    "no diesel. Islanders welcomed the quiet, yet worry about the summer months, when queues are "
    "long already. The county answers that the new ship will make twelve crossings a day instead "
    "of eight, and that a second one may follow if that is not enough.",
    _SUMMARISE + "Moss has no roots. It takes up water through its leaves, which are a single cell "
    "thick, and can dry out completely without dying. When rain comes it is green again within "
    "minutes. This makes it a good neighbour on roofs and walls, where it slows down the rain, "
    "cools the surface in summer and gives shelter to small animals. Gardeners often scrape it "
    "away because they take it for a sign of decay, although it does little harm to stone.",
    _SUMMARISE + "The meeting began at nine. Marta reported that the new booking page is finished "
    "except for refunds, which wait for an answer from the bank. Jonas has moved the customer "
    "data to the new server; two hundred records with broken addresses have to be corrected by "
    "hand, which Ines will do by Friday. The launch was moved from the third to the tenth of May. "
    "Everybody agreed to stop selling vouchers through the old page one week before.",
    _SUMMARISE + "When Hana was nine she found a brass key under the floor of the mill. It fitted "
    "no door in the house, none in the village, and none in the castle above it, though she tried "
    "them all. She carried it through school, two wars and a long marriage. At eighty she gave it "
    "to her great-grandson, who looked at it for a moment and wound up the kitchen clock, which "
    "had stood still for as long as anyone could remember.",
    _SUMMARISE + "A heat pump moves warmth instead of making it. A fluid evaporates in a coil "
    "outside, even in cold air, and takes up heat while doing so. A compressor squeezes the "
    "vapour, which makes it hot, and in a second coil inside the house it condenses and gives the "
    "heat away. For one unit of electricity three or four units of heat arrive in the rooms. The "
    "smaller the difference between outside and heating water, the better the ratio, which is why "
    "well insulated houses with large radiators profit most.",
    _SUMMARISE + "The city library will lend tools as well as books from September on. Drills, "
    "ladders, sewing machines and a small cement mixer can be taken home for a week with an "
    "ordinary library card. Most of them were given by residents after an appeal in the local "
    "newspaper. A retired electrician checks every device before it is lent again. Damage through "
    "normal use costs nothing; whoever returns a tool late pays one euro a day, as for a book.",
    _SUMMARISE + "Dear team, thank you for the parcel, which arrived on Monday. The lamp is the "
    "right one and looks lovely, but its plug is of a type that does not fit our sockets, and one "
    "of the three screws for the base is missing. I would like to keep the lamp. Could you send me "
    "a suitable cable and the screw? If that is not possible I would return it and order the model "
    "with a wooden base instead, which seems to come with the right plug. Kind regards, Petra Voss",
    _SUMMARISE + "Swifts spend almost their whole life in the air. They eat, drink and even sleep "
    "in flight, and young birds that leave the nest may not land for two or three years. In August "
    "they leave Europe and cross the Sahara to spend the winter over the rain forests of the "
    "Congo. They return to the same hole under the same roof in May. Where roofs are renovated "
    "such holes disappear, so that many towns now ask builders to put in nesting bricks.",
)

MATHS = (
    "A train leaves at 9:40 and travels 174 km at 72 km/h. When does it arrive? Show each step.",
    "Solve 3(x - 4) + 7 = 2x + 11 for x and check your answer.",
    "A recipe for 6 people needs 450 g of flour and 4 eggs. How much is needed for 15 people?",
    "A shirt costs 48 euros after a discount of 20 percent. What did it cost before? Explain.",
    "How many ways are there to arrange the letters of the word BANANA? Explain step by step.",
    "The sides of a right triangle that meet at the right angle are 9 cm and 12 cm long. Find the "
    "third side, the perimeter and the area.",
    "Two dice are rolled. What is the probability that their sum is 8? List the cases.",
    "Find the derivative of f(x) = 4x^3 - 6x^2 + 5 and the points where it is zero.",
)

PROMPT_SETS: dict[str, tuple[str, ...]] = {
    "general": GENERAL,
    "chat": CHAT,
    "code": CODE,
    "summarising": SUMMARISING,
    "maths": MATHS,
}


def prompt_sets(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The sets of these names, in their order and each once.

    Raises:
        ValueError: a name that is no set.
    """
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in PROMPT_SETS:
            raise ValueError(f"{name!r} is no built-in prompt set; choose from {list(PROMPT_SETS)}")
    return {name: PROMPT_SETS[name] for name in names}
