// A JSON reader small enough to read: text in, tree out, one arena a file. Numbers are doubles.
#pragma once

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { kNull, kBool, kNumber, kString, kArray, kObject } JsonKind;

typedef struct Json {
  JsonKind kind;
  double number;      // also 0 or 1 of a bool
  char* text;         // of a string
  char* key;          // inside an object
  struct Json* child; // first element or member
  struct Json* next;  // sibling
} Json;

static inline const char* JsonSkip(const char* at) {
  while (isspace((unsigned char)*at)) ++at;
  return at;
}

static inline const char* JsonString(const char* at, char** out) {
  char* text = malloc(strlen(at) + 1);
  size_t used = 0;
  for (++at; *at && *at != '"'; ++at) {
    if (*at == '\\' && at[1]) {
      ++at;
      text[used++] = *at == 'n' ? '\n' : *at == 't' ? '\t' : *at;
    } else {
      text[used++] = *at;
    }
  }
  text[used] = 0;
  *out = text;
  return *at ? at + 1 : at;
}

static inline const char* JsonValue(const char* at, Json** out);

static inline const char* JsonItems(const char* at, Json* parent, char close) {
  Json** tail = &parent->child;
  at = JsonSkip(at + 1);
  while (*at && *at != close) {
    char* key = NULL;
    if (close == '}') {
      at = JsonSkip(JsonString(at, &key));
      if (*at == ':') at = JsonSkip(at + 1);
    }
    Json* item = NULL;
    at = JsonSkip(JsonValue(at, &item));
    item->key = key;
    *tail = item;
    tail = &item->next;
    if (*at == ',') at = JsonSkip(at + 1);
  }
  return *at ? at + 1 : at;
}

static inline const char* JsonValue(const char* at, Json** out) {
  Json* value = calloc(1, sizeof(Json));
  *out = value;
  if (*at == '{' || *at == '[') {
    value->kind = *at == '{' ? kObject : kArray;
    return JsonItems(at, value, *at == '{' ? '}' : ']');
  }
  if (*at == '"') {
    value->kind = kString;
    return JsonString(at, &value->text);
  }
  if (strncmp(at, "null", 4) == 0) return at + 4;
  if (strncmp(at, "true", 4) == 0 || strncmp(at, "false", 5) == 0) {
    value->kind = kBool;
    value->number = *at == 't';
    return at + (*at == 't' ? 4 : 5);
  }
  char* end = NULL;
  value->kind = kNumber;
  value->number = strtod(at, &end);
  if (end == at) {
    fprintf(stderr, "fake: the scenario is no JSON near: %.40s\n", at);
    abort();
  }
  return end;
}

static inline void JsonFree(Json* value) {
  while (value) {
    Json* next = value->next;
    JsonFree(value->child);
    free(value->text);
    free(value->key);
    free(value);
    value = next;
  }
}

// Follows a dotted path of member names; NULL when a step is missing or null.
static inline const Json* JsonAt(const Json* value, const char* path) {
  char step[96];
  while (value && *path) {
    const char* dot = strchr(path, '.');
    size_t length = dot ? (size_t)(dot - path) : strlen(path);
    if (length >= sizeof step) return NULL;
    memcpy(step, path, length);
    step[length] = 0;
    const Json* item = value->kind == kObject ? value->child : NULL;
    while (item && strcmp(item->key, step) != 0) item = item->next;
    value = item;
    path += length + (dot ? 1 : 0);
  }
  return value && value->kind != kNull ? value : NULL;
}

static inline const Json* JsonIndex(const Json* value, unsigned index) {
  const Json* item = value ? value->child : NULL;
  while (item && index--) item = item->next;
  return item;
}

static inline unsigned JsonCount(const Json* value) {
  unsigned count = 0;
  for (const Json* item = value ? value->child : NULL; item; item = item->next) ++count;
  return count;
}

static inline double JsonNumber(const Json* value, double otherwise) {
  return value && (value->kind == kNumber || value->kind == kBool) ? value->number : otherwise;
}

static inline const char* JsonText(const Json* value, const char* otherwise) {
  return value && value->kind == kString ? value->text : otherwise;
}

static inline Json* JsonFile(const char* path) {
  FILE* file = path ? fopen(path, "rb") : NULL;
  if (!file) return NULL;
  size_t size = 0, room = 1 << 16;
  char* text = malloc(room + 1);
  for (size_t got; (got = fread(text + size, 1, room - size, file)) > 0;) {
    size += got;
    if (size == room) text = realloc(text, (room *= 2) + 1);
  }
  fclose(file);
  text[size] = 0;
  Json* root = NULL;
  JsonValue(JsonSkip(text), &root);
  free(text);
  return root;
}
