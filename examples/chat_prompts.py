"""Everyday requests to a chat model, put together from templates: what a drafter is trained on.

``everyday_prompts(n)`` gives n different ones. They are no data set worth the name; they only lead
the target through the kinds of text that people ask for, and the target writes the rest.
"""

import random

# fmt: off
# What is asked about.
TOPICS = [
    "a bicycle", "coffee", "the moon", "volcanoes", "honey bees", "the water cycle",
    "solar panels", "electric cars", "cats", "dogs", "elephants", "penguins", "whales",
    "dinosaurs", "rain forests", "the ocean", "deserts", "mountains", "rivers", "gravity",
    "magnets", "electricity", "light", "sound", "atoms", "DNA", "the heart", "the brain",
    "sleep", "exercise", "healthy eating", "vitamins", "stress", "meditation", "yoga", "running",
    "swimming", "football", "basketball", "chess", "music", "jazz", "the guitar", "the piano",
    "painting", "photography", "film making", "theatre", "dance", "poetry", "novels",
    "libraries", "museums", "castles", "pyramids", "the Roman Empire", "ancient Greece",
    "the Middle Ages", "the Renaissance", "the Industrial Revolution", "democracy", "elections",
    "taxes", "banks", "budgeting", "saving money", "investing", "inflation", "insurance",
    "starting a business", "marketing", "job interviews", "resumes", "teamwork", "leadership",
    "time management", "public speaking", "email", "social media", "the internet", "computers",
    "programming", "Python", "databases", "artificial intelligence", "machine learning",
    "robots", "smartphones", "video games", "cyber security", "passwords", "cloud computing",
    "space travel", "Mars", "black holes", "stars", "the sun", "climate change", "recycling",
    "gardening", "trees", "flowers", "farming", "cooking", "bread", "pasta", "soup", "salads",
    "chocolate", "cheese", "tea", "wine", "pizza", "breakfast", "camping", "hiking", "fishing",
    "travel", "airplanes", "trains", "ships", "bridges", "houses", "furniture", "clothes",
    "shoes", "fashion", "birthday parties", "weddings", "friendship", "family", "parenting",
    "school", "homework", "mathematics", "fractions", "geometry", "statistics", "physics",
    "chemistry", "biology", "geography", "history", "languages", "English grammar", "Spanish",
    "French", "translation", "writing", "journalism", "newspapers", "advertising", "law",
    "hospitals", "doctors", "vaccines", "allergies", "headaches", "the immune system", "teeth",
    "eyes", "hair", "weather", "storms", "snow", "winter", "summer", "spring", "autumn",
    "holidays", "New York", "Paris", "London", "Tokyo", "India", "Africa", "Australia", "Canada",
    "Brazil", "Japan",
]
# About one topic, or two.
REQUESTS = [
    "Explain how {} works.", "What is {}?", "Tell me about {}.", "Why is {} important?",
    "Give me five tips about {}.", "Give me three interesting facts about {}.",
    "Write a short story about {}.", "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?", "Describe {} to a child.",
    "Explain {} in simple terms.", "What are the most common mistakes people make with {}?",
    "How can I learn more about {}?", "Write a short paragraph about {}.",
    "Summarize the history of {}.", "What should a beginner know about {}?",
    "List the main types of {}.", "Write a blog post introduction about {}.",
    "How has {} changed over time?", "What is the difference between {} and {}?",
    "Compare {} and {}.", "Write a dialogue between two friends about {}.",
    "How do I talk to my children about {}?", "Can you help me understand {}?",
    "I have to give a presentation about {}. What should I say?",
    "What are some good questions to ask about {}?", "How does {} affect our daily life?",
    "Write a funny joke about {}.", "Create a weekly plan around {}.",
    "Suggest some activities related to {}.", "What equipment do I need for {}?",
    "Why do people like {}?", "What is the future of {}?",
    "Write a product description for something related to {}.",
]
# The same, asked in other ways.
QUESTIONS = [
    "How does {} stay safe?", "What should I pack for a trip to {}?",
    "What are the main differences between {} and {}?", "How do you make {}?",
    "Describe the process of making {}.", "What happens when {} changes?",
    "How can I improve my {}?", "Is {} good for you?", "How old is {}?", "Who invented {}?",
]
# To somebody, about something.
LETTERS = [
    "Write a polite email to my {} asking for {}.", "Write a letter to my {} about {}.",
    "How do I ask my {} for {}?",
]
# Who gets a letter.
PEOPLE = [
    "boss", "landlord", "teacher", "colleague", "neighbour", "customer", "doctor", "friend",
    "manager", "professor",
]
# What a letter is about.
MATTERS = [
    "a day off", "a refund", "more time", "help with a project", "a meeting next week",
    "a repair", "feedback", "advice", "a recommendation", "an apology", "a new schedule",
    "information about the course",
]
# For code.
CODE_REQUESTS = [
    "Write a Python function that {}.", "How do I write a program that {}?",
    "Write a JavaScript function that {}.", "Show me Python code that {} and explain it.",
    "Write a function which {} and add comments.",
]
# What the code does.
FUNCTIONS = [
    "reverses a string", "checks if a number is prime", "sorts a list of numbers",
    "counts the words in a text", "finds the largest number in a list",
    "computes the factorial of a number", "removes duplicates from a list",
    "reads a file line by line", "converts Celsius to Fahrenheit",
    "checks whether a word is an anagram of another", "returns the n largest items",
    "merges two dictionaries", "computes the average of a list",
    "finds the longest word in a sentence", "generates a random password",
    "counts vowels in a string", "flattens a nested list",
    "computes the greatest common divisor", "validates an email address",
    "draws a triangle of stars",
]
# For a meal.
MEAL_REQUESTS = [
    "Suggest a simple dinner with {}.", "Give me a recipe with {}.", "How do I cook {}?",
    "What can I make with {}?",
]
# What is in the kitchen.
INGREDIENTS = [
    "chicken and rice", "eggs and potatoes", "pasta and mushrooms", "lentils", "fish and lemon",
    "apples and cinnamon", "chickpeas", "tofu and vegetables", "beef and carrots",
    "oats and berries",
]
# How it should be; most people don't say.
WISHES = [
    "", "", "", "Please be brief. ", " In a few sentences.", " Explain step by step.",
    " Use simple words.", " Give examples.",
]
# fmt: on


def everyday_prompts(count: int, seed: int = 0) -> list[str]:
    """``count`` different requests.

    Raises:
        ValueError: more than the templates give with ease (12,000).
    """
    if not 0 < count <= 12_000:
        raise ValueError(f"count={count} must be 1 to 12000")
    rng = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[_prompt(rng)] = None
    return list(prompts)


def _prompt(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.06:
        text = rng.choice(LETTERS).format(rng.choice(PEOPLE), rng.choice(MATTERS))
    elif kind < 0.13:
        text = rng.choice(CODE_REQUESTS).format(rng.choice(FUNCTIONS))
    elif kind < 0.18:
        text = rng.choice(MEAL_REQUESTS).format(rng.choice(INGREDIENTS))
    else:
        templates = QUESTIONS if kind < 0.35 else REQUESTS
        text = rng.choice(templates).format(*rng.sample(TOPICS, 2))
    wish = rng.choice(WISHES)
    return wish + text if wish.endswith(". ") else text + wish
