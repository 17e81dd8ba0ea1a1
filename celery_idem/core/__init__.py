"""The mechanism. Nothing in here imports celery, redis or sqlalchemy."""
