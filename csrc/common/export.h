// Marks symbols that one shared library of this package exports to the others. All other symbols are hidden.

#pragma once

#define FASTFORMER_API __attribute__((visibility("default")))
