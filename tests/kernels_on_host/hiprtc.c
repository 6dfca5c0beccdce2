// A test double of libhiprtc.so: the "code" of a program is its text and the options of the
// compilation. A text that contains the word "refused" does not compile.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char* text;
  char options[256];
} Program;

static const char LOG[] = "line 1: refused";
static int programs;

__attribute__((destructor)) static void leaks(void) {
  if (programs) fprintf(stderr, "%d programs leaked\n", programs);
}

int hiprtcVersion(int* major, int* minor) {
  *major = 9, *minor = 1;
  return 0;
}

int hiprtcCreateProgram(Program** program, const char* text, const char* name, int headers,
                        const char** header, const char** names) {
  if (!text || !name || headers || header || names) return 3;
  *program = calloc(1, sizeof(Program));
  (*program)->text = strdup(text);
  programs++;
  return 0;
}

int hiprtcCompileProgram(Program* program, int count, const char** options) {
  for (int i = 0; i < count; i++) {
    strcat(program->options, " ");
    strcat(program->options, options[i]);
  }
  return strstr(program->text, "refused") ? 6 : 0;
}

int hiprtcGetProgramLogSize(Program* program, size_t* size) {
  (void)program;
  *size = sizeof LOG;
  return 0;
}

int hiprtcGetProgramLog(Program* program, char* log) {
  (void)program;
  memcpy(log, LOG, sizeof LOG);
  return 0;
}

int hiprtcGetCodeSize(Program* program, size_t* size) {
  *size = strlen(program->text) + strlen(program->options);
  return 0;
}

int hiprtcGetCode(Program* program, char* code) {
  memcpy(code, program->text, strlen(program->text));
  memcpy(code + strlen(program->text), program->options, strlen(program->options));
  return 0;
}

int hiprtcDestroyProgram(Program** program) {
  free((*program)->text);
  free(*program);
  *program = NULL;
  programs--;
  return 0;
}
