from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.CreateModel(
            "Entry",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("what", models.CharField(max_length=20)),
                ("order", models.IntegerField()),
            ],
        ),
    )
