/* What the bindings of TensorRT link against, in a library that does nothing: every factory answers NULL. */
#define FACTORY(name) \
    void* name(void) { return (void*)0; }
FACTORY(createInferBuilder_INTERNAL)
FACTORY(createInferRefitter_INTERNAL)
FACTORY(createInferRuntime_INTERNAL)
FACTORY(createNvOnnxParser_INTERNAL)
FACTORY(createNvOnnxParserRefitter_INTERNAL)
FACTORY(getBuilderPluginRegistry)
FACTORY(getPluginRegistry)
FACTORY(initLibNvInferPlugins)
int getNvOnnxParserVersion(void) { return 110400; }
